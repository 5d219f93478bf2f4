"""Reports to test with: one of every kind of block, and one that tries to break out.

`sample` has every kind of chart and table, `evil` has markup and scripts in each of its texts, and
`not_finite` has NaN and infinity where numbers are drawn. The tests of the written files and those
in a browser use the same three.
"""

from keyhole.lab.report.document import Chart, HeatMap, Report, Section, Series, Table, Verdict

NAN, INF = float("nan"), float("inf")
EVIL = """</script><script>alert("x")</script><img src=x onerror=alert(1)>'"&$x_1$ $HOME ${lead} %{y} \\frac{ _{a}"""  # noqa: E501


def every_block(name=""):
    n = [16.0, 64.0, 256.0, 1024.0]
    error = [1.0, 0.4, 0.15, 0.06]
    low, high = [0.9 * e for e in error], [1.1 * e for e in error]
    curves = [
        Series("attention", n, error, low, high, "points", "attention"),
        Series("predicted", n, low, look="dashed", role="attention"),
        Series("oracle", n, low, look="thin", role="oracle"),
        Series("kernel", n, low, look="line", role="kernel"),
        Series("kernel", n, error, low, high, "band", "kernel"),
        Series("something new", n, high, hover=["a", "b", "c", "d"]),
    ]
    rows = [
        {"target": "f_{1,2}", "n": 120, "ratio": 12.5},
        {"target": "g", "n": None, "ratio": 3.25},
    ]
    return [
        Chart(
            f"{name}log",
            "f_{1,2}",
            "n",
            "error",
            curves,
            x_log=True,
            y_log=True,
            marks={"30 %": 0.3},
        ),
        Chart(f"{name}linear", "again", "n", "error", curves[:2], rows=[{"n": 16, "error": 1.0}]),
        HeatMap(
            f"{name}map",
            "z",
            "head",
            "layer",
            ["0", "1", "1"],
            ["a", "b"],
            [[1, -2, 3], [0.0, NAN, 1.0]],
            0.0,
        ),
        HeatMap(f"{name}plain", "share", "head", "layer", ["0"], ["a"], [[0.5]]),
        Table(f"{name}table", "sizes", rows),
    ]


def sample(name="", sections=2):
    states = ("holds", "partly", "does not show", "not tested", "information")
    return Report(
        "A report",
        "What it is about.",
        [
            Section(
                f"s{k}",
                f"Section {k}",
                "A claim.",
                every_block(f"{name}{k}_"),
                Verdict(states[k % 5], "A sentence.", {"ratio": "12 ± 1"}),
                "d = 16",
                ["A paragraph."],
            )
            for k in range(sections)
        ],
        {"seed": "0", "command": "keyhole reproduce"},
    )


def evil():
    """Every text in it tries to leave its place."""
    curve = Series(
        EVIL, [1.0, 2.0], [1.0, 2.0], [0.5, 1.0], [1.5, 3.0], role=EVIL, hover=[EVIL, EVIL]
    )
    blocks = [
        Chart(EVIL, EVIL, EVIL, EVIL, [curve], rows=[{EVIL: EVIL}], note=EVIL, marks={EVIL: 1.5}),
        Chart("../../outside", EVIL, EVIL, EVIL, [curve], x_log=True, y_log=True),
        HeatMap(EVIL, EVIL, EVIL, EVIL, [EVIL, EVIL], [EVIL], [[1.0, 2.0]], note=EVIL),
        Table("__proto__", EVIL, [{EVIL: EVIL}], EVIL),
    ]
    section = Section(EVIL, EVIL, EVIL, blocks, Verdict("holds", EVIL, {EVIL: EVIL}), EVIL, [EVIL])
    return Report(EVIL, EVIL, [section, section], {EVIL: EVIL})


def not_finite():
    """Numbers that are not numbers, zeros and negatives on logarithmic axes, single points, and
    nothing at all.
    """
    strange = [NAN, INF, -INF, 0.0, -1.0, 1e-300, 1e300, 1.0]
    curve = Series("strange", strange, strange[::-1], strange, strange[::-1])
    gone = Series("gone", [NAN, NAN], [NAN, INF], look="line", role="kernel")
    charts = [
        Chart(
            f"strange_{x}{y}",
            "strange",
            "x",
            "y",
            [curve, gone],
            x_log=x,
            y_log=y,
            marks={"none": NAN, "below": -1.0},
        )
        for x in (False, True)
        for y in (False, True)
    ]
    charts += [
        Chart("gone", "gone", "x", "y", [gone], x_log=True, y_log=True),
        Chart("empty", "empty", "x", "y", []),
        Chart("no_points", "no points", "x", "y", [Series("none", [], [])], x_log=True, y_log=True),
        Chart(
            "one_point",
            "one point",
            "x",
            "y",
            [Series("one", [8.0], [0.5], look="dashed")],
            x_log=True,
            y_log=True,
        ),
        Chart("zeros", "zeros", "x", "y", [Series("zero", [1.0, 2.0], [0.0, 0.0])], y_log=True),
    ]
    maps = [
        HeatMap("all_gone", "all gone", "x", "y", ["a", "b"], ["c"], [[NAN, INF]], centre=0.0),
        HeatMap("constant", "constant", "x", "y", ["a", "b"], ["c"], [[2.0, 2.0]]),
        HeatMap("nothing", "nothing", "x", "y", [], [], []),
    ]
    table = Table("odd_table", "odd", [{"a": NAN, "b": INF}, {"a": None, "b": -1e-30}])
    return Report(
        "Strange numbers",
        "",
        [Section("s", "Strange", "", [*charts, *maps, table, Table("no_rows", "", [])])],
    )
