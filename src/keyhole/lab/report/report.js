"use strict";
// Draws the charts of a report. Data and colours come in the JSON element; shades come from the style sheet.
(() => {
  const root = document.documentElement;
  const { inks, charts } = JSON.parse(document.getElementById("keyhole:data").textContent);
  const system = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const MARKERS = {
    circle: "circle", square: "square", triangle: "triangle-up", down: "triangle-down",
    diamond: "diamond", cross: "cross", pentagon: "pentagon", star: "star",
  };
  const CONFIG = {
    displaylogo: false, responsive: true, doubleClick: "reset", displayModeBar: !touch,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };

  // ---- colours -------------------------------------------------------------------------------------------------
  const dark = () => root.dataset.shade === "dark";
  const shade = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const inkOf = (role) => inks[role][dark() ? 1 : 0];
  const faded = (hex, alpha) =>
    `rgba(${[1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)).join(",")},${alpha})`;
  const diverging = () => dark()
    ? [[0, "#6db8f2"], [0.25, "#2f6f9f"], [0.5, "#22272c"], [0.75, "#a85a2a"], [1, "#ff9a5c"]]
    : [[0, "#0a5c94"], [0.25, "#7fb4d8"], [0.5, "#f6f5f1"], [0.75, "#eda877"], [1, "#b64c00"]];
  const rising = () => dark()
    ? [[0, "#1b2126"], [0.5, "#2f7f8f"], [1, "#c8f0c0"]]
    : [[0, "#f4f5ef"], [0.5, "#5fa8b0"], [1, "#0b3c5d"]];

  // ---- ticks of logarithmic axes ---------------------------------------------------------------------------------
  const power = (k) => (k >= -3 && k <= 4 ? String(Number(`1e${k}`)) : `10<sup>${k < 0 ? "−" + -k : k}</sup>`);
  const spread = (values, most) => {
    const step = Math.ceil(values.length / most);
    return values.filter((_, k) => k % step === 0);
  };
  const plain = (v) => (v >= 1e5 || v < 1e-3 ? v.toExponential(0).replace(/e\+?(-?)(\d+)/, (_, sign, k) => `·10<sup>${sign && "−"}${k}</sup>`) : String(Number(v.toPrecision(3))));

  function logTicks([low, high], doubling, most) {
    if (!(high > low)) return {};
    if (doubling && high - low < 6) {
      const first = Math.ceil(low / Math.log10(2) - 1e-6), last = Math.floor(high / Math.log10(2) + 1e-6);
      const powers = spread([...Array(Math.max(0, last - first + 1)).keys()].map((k) => first + k), most);
      if (powers.length > 1) {
        return { tickvals: powers.map((k) => 2 ** k), ticktext: powers.map((k) => (k < 17 ? String(2 ** k) : `2<sup>${k}</sup>`)) };
      }
    }
    const decades = [];
    for (let k = Math.floor(low); k <= Math.ceil(high); k++) decades.push(k);
    const inside = (v) => Math.log10(v) >= low - 1e-9 && Math.log10(v) <= high + 1e-9;
    // the densest of these that leaves room to read
    for (const steps of [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 5], [1, 3], [1]]) {
      const values = decades.flatMap((k) => steps.map((s) => s * 10 ** k)).filter(inside);
      if (values.length > 2 && values.length <= most) {
        return { tickvals: values, ticktext: values.map((v) => (steps.length === 1 ? power(Math.round(Math.log10(v))) : plain(v))) };
      }
    }
    const powers = spread(decades.filter((k) => inside(10 ** k)), most);
    if (powers.length > 1) return { tickvals: powers.map((k) => 10 ** k), ticktext: powers.map(power) };
    return { tickvals: null, ticktext: null, tickmode: "auto" };
  }

  // ---- curves ----------------------------------------------------------------------------------------------------
  const isNumber = (v) => typeof v === "number";
  const positive = (values, log) => values.filter((v) => isNumber(v) && (!log || v > 0));

  function range(values, log) {
    const numbers = positive(values, log).map((v) => (log ? Math.log10(v) : v));
    if (!numbers.length) return log ? [-1, 1] : [0, 1];
    const low = Math.min(...numbers), high = Math.max(...numbers);
    const room = high > low ? 0.045 * (high - low) : log ? 0.3 : 0.5 * Math.abs(high) || 0.5;
    return [low - room, high + room];
  }

  function traces(chart, hidden) {
    return chart.series.flatMap((series) => {
      const colour = inkOf(series.role);
      const visible = !hidden.has(JSON.stringify(series.key));
      const common = {
        type: "scatter", x: series.x, y: series.y, visible, showlegend: false, hovertext: series.hover,
        hovertemplate: "%{hovertext}<extra></extra>",
        hoverlabel: { bordercolor: colour },
      };
      if (series.look === "band") {
        const edge = { ...common, mode: "lines", line: { width: 0, color: colour }, hovertemplate: undefined, hoverinfo: "skip" };
        return [
          { ...edge, y: series.low ?? series.y },
          { ...edge, y: series.high ?? series.y, fill: "tonexty", fillcolor: faded(colour, dark() ? 0.22 : 0.15) },
        ];
      }
      if (series.look !== "points") {
        const line = {
          line: { color: colour, width: 2.2 }, dashed: { color: colour, width: 1.8, dash: "6px,4px" },
          thin: { color: faded(colour, 0.75), width: 1 },
        }[series.look];
        return [{ ...common, mode: series.x.length > 1 ? "lines" : "markers", line, marker: { color: colour, size: 5 } }];
      }
      const bars = series.low && series.high ? {
        error_y: {
          type: "data", symmetric: false, thickness: 1.2, width: 3, color: faded(colour, 0.75),
          array: series.high.map((v, k) => (isNumber(v) && isNumber(series.y[k]) ? Math.max(0, v - series.y[k]) : 0)),
          arrayminus: series.low.map((v, k) => (isNumber(v) && isNumber(series.y[k]) ? Math.max(0, series.y[k] - v) : 0)),
        },
      } : {};
      const marker = { color: colour, size: chart.names.length ? 9 : 7, symbol: MARKERS[inks[series.role][2]] };
      if (chart.names.length) return [{ ...common, x: series.y, y: series.x, error_x: bars.error_y, mode: "markers", marker }];
      return [{ ...common, ...bars, mode: "lines+markers", line: { color: colour, width: 2 }, marker }];
    });
  }

  function marks(chart, xs) {
    const ends = range(xs, chart.x_log).map((v) => (chart.x_log ? 10 ** v : v));
    return chart.marks.filter(([, level]) => isNumber(level) && (!chart.y_log || level > 0)).map(([name, level]) => ({
      type: "scatter", mode: "lines+text", x: ends, y: [level, level], text: ["", `${name} `], textposition: "top left",
      textfont: { color: shade("soft"), size: 11 }, line: { color: shade("faint"), width: 1, dash: "1px,3px" },
      hoverinfo: "skip", showlegend: false, cliponaxis: false,
    }));
  }

  // a long label goes on in a second line; a third, and the chart would have no room
  function wrapped(label, length) {
    const lines = [""];
    for (const word of label.split(" ")) {
      const fits = (lines.at(-1) + word).replace(/<[^>]*>|&\w+;/g, ".").length <= Math.max(12, length / 6.5);
      if (fits || !lines.at(-1)) lines[lines.length - 1] += `${word} `;
      else lines.push(`${word} `);
    }
    return lines.slice(0, 2).join("<br>").trim() + (lines.length > 2 ? "…" : "");
  }

  function axis(label, log, limits, doubling, most) {
    return {
      title: { text: label, standoff: 8, font: { size: 12, color: shade("soft") } }, type: log ? "log" : "linear", range: limits,
      ...(log ? logTicks(limits, doubling, most) : { nticks: most + 1 }),
      gridcolor: shade("grid"), zerolinecolor: shade("line"), linecolor: shade("line"), tickfont: { size: 11, color: shade("soft") },
      zeroline: !log, showline: true, ticks: "", automargin: true, exponentformat: "power",
    };
  }

  const layoutOf = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, showlegend: false,
    font: { family: shade("sans"), size: 12, color: shade("ink") }, margin: { l: 52, r: 12, t: 10, b: 44 },
    hovermode: "closest", dragmode: touch ? false : "zoom",
    hoverlabel: { bgcolor: shade("raised"), font: { family: shade("sans"), size: 12, color: shade("ink") }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: shade("faint"), activecolor: shade("ink") },
    ...more,
  });

  const doubled = (xs) => xs.length > 0 && xs.every((v) => v > 0 && Math.abs(Math.log2(v) - Math.round(Math.log2(v))) < 1e-9);

  function curves(chart, hidden, width, height) {
    // the axes span what may be shown, hidden or not, so that hiding a curve moves nothing
    const xs = positive(chart.series.flatMap((s) => s.x), chart.x_log);
    const ys = chart.series.flatMap((s) => [...s.y, ...(s.low ?? []), ...(s.high ?? [])]).concat(chart.marks.map((m) => m[1]));
    const most = width < 380 ? 5 : 8;
    const doubling = chart.x_log && doubled([...new Set(xs)]);
    const layout = layoutOf({
      xaxis: axis(wrapped(chart.x_label, width - 70), chart.x_log, range(xs, chart.x_log), doubling, most),
      yaxis: axis(wrapped(chart.y_label, height - 60), chart.y_log, range(floored(ys, chart), chart.y_log), false, 7),
    });
    if (chart.names.length) { // the chart lies on its side
      [layout.xaxis, layout.yaxis] = [
        axis(wrapped(chart.y_label, width - 160), false, range([0, ...ys], false), false, 6),
        { ...axis("", false, [chart.names.length - 0.5, -0.5], false, most), tickmode: "array", tickvals: [...chart.names.keys()], ticktext: chart.names.map((name) => (width < 480 ? wrapped(name, 145) : name)) },
      ];
    }
    return { data: [...traces(chart, hidden), ...marks(chart, xs)], layout, doubling, most };
  }

  // on a logarithmic axis an error bar that reaches far below every point must not squeeze the points together
  function floored(ys, chart) {
    if (!chart.y_log) return ys;
    const centres = positive(chart.series.flatMap((s) => s.y), true);
    const floor = centres.length ? Math.min(...centres) / 3 : 0;
    return ys.filter((v) => isNumber(v) && v >= floor);
  }

  // ---- heat maps -------------------------------------------------------------------------------------------------
  function places(names, most) {
    const kept = spread([...names.keys()], most);
    return { tickmode: "array", tickvals: kept, ticktext: kept.map((k) => names[k]) };
  }

  function map(chart, width, height, bare) {
    const flat = chart.values.flat().filter(isNumber);
    const cell = (width - 120) / Math.max(1, chart.columns.length);
    const limits = chart.centre === null
      ? { zmin: Math.min(...flat, Infinity) === Infinity ? 0 : Math.min(...flat), zmax: flat.length ? Math.max(...flat) : 1, colorscale: rising() }
      : { zmin: chart.centre - chart.reach, zmax: chart.centre + chart.reach, colorscale: diverging() };
    const trace = {
      type: "heatmap", z: chart.values, hovertext: chart.hover, hovertemplate: "%{hovertext}<extra></extra>", xgap: 1, ygap: 1, ...limits,
      colorbar: { thickness: 10, outlinewidth: 0, len: 1, tickfont: { size: 11, color: shade("soft") }, nticks: 5 },
      ...(cell >= 34 && !bare ? { text: chart.texts, texttemplate: "%{text}", textfont: { size: 11 } } : {}),
    };
    const plainAxis = { showgrid: false, zeroline: false, ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)", automargin: true, tickfont: { size: 11, color: shade("soft") } };
    const title = (text) => ({ text, standoff: 8, font: { size: 12, color: shade("soft") } });
    const layout = layoutOf({
      xaxis: { ...plainAxis, title: title(wrapped(chart.x_label, width - 120)), ...places(chart.columns, Math.max(3, Math.floor(width / 34))) },
      yaxis: { ...plainAxis, title: title(wrapped(chart.y_label, height - 60)), autorange: "reversed", ...places(chart.index, 32) },
    });
    const over = { type: "scatter", xaxis: "x", yaxis: "y", showlegend: false, cliponaxis: false };
    const line = { ...over, mode: "lines", x: chart.line.map((_, k) => k), y: chart.line, line: { color: shade("ink"), width: 2.5 }, hoverinfo: "skip" };
    const points = {
      ...over, mode: "markers", x: chart.points.map((p) => p[0]), y: chart.points.map((p) => p[1]), hovertext: chart.points.map((p) => p[2]),
      hovertemplate: "%{hovertext}<extra></extra>", marker: { size: 13, color: shade("raised"), line: { color: shade("ink"), width: 2.5 } },
    };
    return { data: [trace, ...(chart.line.length ? [line] : []), ...(chart.points.length ? [points] : [])], layout };
  }

  // ---- drawing ---------------------------------------------------------------------------------------------------
  const plots = [...document.querySelectorAll(".plot")];
  const drawn = new Set();
  const hiddenIn = new Map();

  function hiddenFor(element) {
    const group = element.closest(".group");
    if (!hiddenIn.has(group)) hiddenIn.set(group, new Set());
    return hiddenIn.get(group);
  }

  // bare: without the words in the cells, which take most of the time, while a hand is on a slider
  async function draw(element, bare = false) {
    const chart = charts[element.dataset.chart];
    const size = [element.clientWidth, element.clientHeight];
    const figure = chart.kind === "map" ? map(chart, ...size, bare) : curves(chart, hiddenFor(element), ...size);
    const first = !drawn.has(element);
    drawn.add(element);
    if (first) element.replaceChildren();
    const config = { ...CONFIG, toImageButtonOptions: { format: "png", filename: element.dataset.chart, scale: 2 } };
    await Plotly.react(element, figure.data, figure.layout, config);
    if (first && chart.kind !== "map") followZoom(element, chart);
    root.dataset.drawn = String(drawn.size);
    if (drawn.size === plots.length) root.dataset.charts = "done";
  }

  // our own ticks on logarithmic axes, placed anew after each zoom
  function followZoom(element, chart) {
    let busy = false;
    element.on("plotly_relayout", async (change) => {
      if (busy || !Object.keys(change).some((key) => /^[xy]axis\.(range|autorange)/.test(key))) return;
      busy = true;
      const { doubling, most } = curves(chart, hiddenFor(element), element.clientWidth, element.clientHeight);
      const update = {};
      for (const [name, log, twos, count] of [["xaxis", chart.x_log, doubling, most], ["yaxis", chart.y_log, false, 7]]) {
        if (!log) continue;
        const { tickvals = null, ticktext = null, tickmode = "array" } = logTicks(element.layout[name].range, twos, count);
        Object.assign(update, { [`${name}.tickmode`]: tickmode, [`${name}.tickvals`]: tickvals, [`${name}.ticktext`]: ticktext });
      }
      await Plotly.relayout(element, update);
      busy = false;
    });
  }

  // what is in view comes first, the rest when there is time, one at a time so that the page stays quick
  const later = window.requestIdleCallback ?? ((task) => setTimeout(task, 30));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      if (!drawn.has(entry.target)) draw(entry.target);
    }
  }, { rootMargin: "300px" });
  plots.forEach((plot) => watcher.observe(plot));
  const rest = async () => {
    const next = plots.find((plot) => !drawn.has(plot));
    if (!next) return;
    await draw(next);
    later(rest);
  };
  if (!plots.length) root.dataset.charts = "done";
  addEventListener("beforeprint", () => plots.forEach((plot) => drawn.has(plot) || draw(plot)));

  // ---- light and dark --------------------------------------------------------------------------------------------
  const button = document.getElementById("keyhole:theme");
  const NEXT = { system: "light", light: "dark", dark: "system" };
  const SAYS = { system: "Colours: as the system has them", light: "Colours: light", dark: "Colours: dark" };
  let theme = "system";
  try { theme = NEXT[localStorage.getItem("keyhole-theme")] ? localStorage.getItem("keyhole-theme") : "system"; } catch { /* no storage here */ }

  function applyTheme() {
    root.dataset.theme = theme;
    root.dataset.shade = theme === "dark" || (theme === "system" && system.matches) ? "dark" : "light";
    button.title = SAYS[theme];
    button.setAttribute("aria-label", SAYS[theme]);
    drawn.forEach((plot) => (plot.isConnected ? draw(plot) : drawn.delete(plot)));
  }
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    try { localStorage.setItem("keyhole-theme", theme); } catch { /* no storage here */ }
    applyTheme();
  });
  system.addEventListener("change", applyTheme);
  applyTheme();
  later(rest);

  // ---- legends and contents --------------------------------------------------------------------------------------
  document.addEventListener("click", ({ target }) => {
    const key = target.closest(".legend button");
    if (!key) return;
    const group = key.closest(".group");
    const hidden = hiddenFor(key);
    const shown = key.getAttribute("aria-pressed") === "true";
    key.setAttribute("aria-pressed", String(!shown));
    if (shown) hidden.add(JSON.stringify(JSON.parse(key.dataset.key)));
    else hidden.delete(JSON.stringify(JSON.parse(key.dataset.key)));
    group.querySelectorAll(".plot").forEach((plot) => drawn.has(plot) && draw(plot));
  });
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const reading = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((link) => link.removeAttribute("aria-current"));
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-15% 0px -75% 0px" });
  document.querySelectorAll("main > section").forEach((section) => reading.observe(section));
  // a page whose charts change puts their data and inks here, then draws
  window.keyhole = { inks, charts, draw };
})();
