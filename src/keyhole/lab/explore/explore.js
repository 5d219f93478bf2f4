"use strict";
// The page of `keyhole explore`. The address holds the state; the server computes; report.js draws.
(() => {
  const { charts, draw } = window.keyhole;
  const $$ = (id) => document.getElementById(id);
  const make = (tag, more) => Object.assign(document.createElement(tag), more);
  const listed = (notes) => notes.map((textContent) => make("li", { textContent }));
  const NUMBERS = [
    { name: "n", label: "training sets n", low: 2, high: 1e5, usual: 400, whole: true },
    { name: "M", label: "heads M", low: 1, high: 2000, usual: 20, whole: true },
    { name: "d", label: "token dimension d", low: 1, high: 128, usual: 8, whole: true },
    { name: "N", label: "keys per set N", low: 1, high: 128, usual: 4, whole: true },
    { name: "c", label: "mean c of biased heads", low: 0, high: 3, usual: 1, step: 0.05 },
    { name: "ridge", label: "penalty λ (α = nλ)", low: 1e-9, high: 1, usual: 1e-5 },
    { name: "noise", label: "noise, as a share of Var f*", low: 0, high: 2, usual: 0, step: 0.05 },
    { name: "top", label: "largest n of curves", low: 100, high: 1e6, usual: 10000, whole: true },
  ];
  const USUAL = { view: "curves", target: "corr * token", activation: "relu", picks: "", tasks: "nearest-key", ...Object.fromEntries(NUMBERS.map((k) => [k.name, String(k.usual)])) };
  const MEASURED = ["curves", "surface", "heads", "tasks"];
  const state = { ...USUAL, ...Object.fromEntries(new URLSearchParams(location.search)) };

  // ---- the address -------------------------------------------------------------------------------------------------
  const query = (more = {}) => {
    const all = { ...state, ...more };
    return new URLSearchParams(Object.entries(all).filter(([key, value]) => value !== USUAL[key])).toString();
  };
  let writing = 0;
  function remember() {
    clearTimeout(writing);
    writing = setTimeout(() => history.replaceState(null, "", `?${query()}`), 150); // browsers allow few of these a second
    $$("save").href = `save?${query()}`;
  }

  // ---- asking: in each place one request on the way, then the newest; what is stale is dropped ----------------------------
  const lanes = {};
  async function ask(place, path, more = {}) {
    const lane = (lanes[place] ??= { wanted: null, busy: false, stop: null, since: 0 });
    lane.wanted = { path, query: query(more), view: state.view };
    if (lane.busy) {
      if (performance.now() - lane.since > 400) lane.stop?.abort();
      return;
    }
    lane.busy = true;
    while (lane.wanted) {
      const mine = lane.wanted;
      lane.wanted = null;
      lane.stop = new AbortController();
      lane.since = performance.now();
      const slow = setTimeout(() => { $$("working").hidden = false; }, 200);
      let answer = null;
      try {
        const reply = await fetch(`${mine.path}?${mine.query}`, { signal: lane.stop.signal });
        answer = reply.headers.get("content-type")?.includes("json") ? await reply.json() : { error: await reply.text() };
      } catch (error) {
        if (error.name !== "AbortError") answer = { error: "the server has gone: start `keyhole explore` again." };
      }
      clearTimeout(slow);
      if (answer && mine.view === state.view) await HEARD[place](answer);
      else if (!lane.wanted && mine.view === state.view) lane.wanted = mine; // aborted for one that is gone by now
    }
    lane.busy = false;
    if (!Object.values(lanes).some((other) => other.busy)) $$("working").hidden = true;
  }

  // what takes longer than a moment comes once the settings rest
  function patient(place, answer, more) {
    const settings = query();
    if (answer.late.length) setTimeout(() => { if (query() === settings) ask(place, "view", more); }, 300);
  }

  async function show(place, answer) {
    Object.assign(charts, answer.charts);
    const fresh = make("template", { innerHTML: answer.html });
    const old = new Map([...place.querySelectorAll(".plot")].map((plot) => [plot.dataset.chart, plot]));
    for (const plot of fresh.content.querySelectorAll(".plot")) {
      const known = old.get(plot.dataset.chart);
      if (!known) continue;
      known.setAttribute("aria-label", plot.getAttribute("aria-label"));
      plot.replaceWith(known);
    }
    place.replaceChildren(fresh.content);
    const moving = performance.now() - touched < 300; // then what is in sight has to do; `refresh` draws the rest
    const plots = [...place.querySelectorAll(".plot")].filter((plot) => !moving || plot.getBoundingClientRect().top < innerHeight);
    await Promise.all(plots.map((plot) => draw(plot, moving)));
    place.querySelectorAll(".plot.map").forEach(listenForClicks);
  }

  const HEARD = {
    async shown(answer) {
      const typed = answer.error?.startsWith("cannot read the target") || answer.error?.startsWith("a target ");
      $$("target-error").textContent = typed ? answer.error : "";
      $$("target").setAttribute("aria-invalid", String(!!typed));
      $$("problem").textContent = answer.error && !typed ? answer.error : "";
      if (answer.error) return;
      $$("expanded").textContent = answer.expanded === state.target ? "" : `= ${answer.expanded}`;
      $$("notes").replaceChildren(...listed(answer.notes));
      $$("python").querySelector("code").textContent = answer.python;
      finished = answer.finished;
      offered = answer;
      measureButton();
      await show($$("shown"), answer);
      patient("shown", answer);
    },
    async more(answer) {
      if (answer.error) return;
      const said = [...$$("notes").children].map((note) => note.textContent);
      $$("notes").append(...listed(answer.notes.filter((text) => !said.includes(text))));
      await show($$("more"), answer);
      patient("more", answer, { view: state.view === "heads" ? "rotation" : "needs" });
    },
  };

  let later = 0, touched = -Infinity;
  function refresh() {
    remember();
    summarise();
    touched = performance.now();
    if (state.view === "data") return;
    ask("shown", "quick");
    clearTimeout(later);
    later = setTimeout(() => { // what is slower waits until the settings rest
      document.querySelectorAll("#shown .plot").forEach((plot) => draw(plot));
      if (state.view === "curves") ask("more", "quick", { view: "needs" });
      if (state.view === "heads") ask("more", "quick", { view: "rotation" });
    }, 300);
  }

  // ---- settings ------------------------------------------------------------------------------------------------------
  // where there is little room the settings fold away, and a line says what they are
  const narrow = matchMedia("(max-width: 34rem)");
  const fold = () => { $$("fold").open = !narrow.matches; };
  narrow.addEventListener("change", fold);
  fold();
  function summarise() {
    const { target, n, M, d, N, c, tasks } = state;
    $$("settings-line").textContent = state.view === "tasks" ? tasks.split(",").join(", ") : `${target}, n = ${n}, M = ${M}, d = ${d}, N = ${N}, c = ${c}`;
  }

  const setters = {};
  for (const { name, label, low, high, whole, step } of NUMBERS) {
    const linear = step !== undefined;
    const row = make("div", { className: "number" }), words = make("label", { textContent: label, htmlFor: name });
    const slider = make("input", { type: "range", id: `${name}-slider`, min: 0, max: 1000, step: 1, ariaLabel: `${label}, slider` });
    const box = make("input", { type: "text", inputMode: "decimal", id: name });
    const valueAt = (place) => {
      const value = linear ? low + (high - low) * place / 1000 : low * (high / low) ** (place / 1000);
      return String(whole ? Math.round(value) : linear ? Number((Math.round(value / step) * step).toFixed(4)) : Number(value.toPrecision(2)));
    };
    const placeOf = (value) => 1000 * (linear ? (value - low) / (high - low) : Math.log(value / low) / Math.log(high / low));
    setters[name] = () => {
      if (document.activeElement !== box) box.value = state[name];
      const place = placeOf(Number(state[name]));
      if (document.activeElement !== slider && Number.isFinite(place)) slider.value = String(Math.round(place));
      slider.setAttribute("aria-valuetext", state[name]);
    };
    const take = (text) => { state[name] = text; setters[name](); box.value = box === document.activeElement ? box.value : text; refresh(); };
    slider.addEventListener("input", () => take(valueAt(Number(slider.value))));
    box.addEventListener("input", () => { if (box.value.trim()) take(box.value.trim()); });
    row.append(words, slider, box);
    $$("numbers").append(row);
  }

  const SHAPES = [
    ["corr", /^corr(?:\^(\d+))? \* token$/], ["token", /^token(?:\^(\d+))?$/], ["query", /^query(?:\^(\d+))?$/],
    ["rotated", /^rotated\(([\d.]+)\)(?:\^(\d+))? \* token$/],
  ];
  function familyOf(text) {
    const [name, shape] = SHAPES.find(([, pattern]) => pattern.test(text)) ?? ["typed", null];
    const found = shape?.exec(text);
    if (found) $$("power").value = (name === "rotated" ? found[2] : found[1]) ?? "1";
    if (name === "rotated") $$("gamma").value = found[1];
    return name;
  }
  function written() {
    const q = Math.min(8, Math.max(1, Math.round(Number($$("power").value)) || 1));
    const power = (name) => (q === 1 ? name : `${name}^${q}`);
    return { corr: `${power("corr")} * token`, token: power("token"), query: power("query"), rotated: `${power(`rotated(${$$("gamma").value})`)} * token` }[$$("family").value];
  }
  function showTarget() {
    if (document.activeElement !== $$("target")) $$("target").value = state.target;
    $$("family").value = familyOf(state.target);
    $$("gamma-pair").hidden = $$("family").value !== "rotated";
  }
  for (const id of ["family", "power", "gamma"]) {
    $$(id).addEventListener("input", () => {
      if ($$("family").value === "typed") { $$("target").focus(); return; }
      state.target = written();
      $$("gamma-pair").hidden = $$("family").value !== "rotated";
      $$("target").value = state.target;
      refresh();
    });
  }
  $$("target").addEventListener("input", () => { state.target = $$("target").value; showTarget(); refresh(); });
  $$("activation").value = state.activation;
  $$("activation").addEventListener("input", () => { state.activation = $$("activation").value; refresh(); });
  $$("settings").addEventListener("submit", (event) => event.preventDefault());

  const boxes = [...$$("tasks").querySelectorAll("input")];
  for (const box of boxes) {
    box.checked = state.tasks.split(",").includes(box.value);
    box.addEventListener("change", () => {
      const chosen = boxes.filter((other) => other.checked).map((other) => other.value);
      if (!chosen.length) { box.checked = true; return; } // one task at least
      state.tasks = chosen.join(",");
      refresh();
    });
  }

  // ---- views -----------------------------------------------------------------------------------------------------------
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function turnTo(view) {
    state.view = view;
    for (const tab of tabs) {
      const chosen = tab.dataset.view === view;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      if (chosen) $$("panel").setAttribute("aria-labelledby", tab.id);
    }
    const data = view === "data";
    $$("drop").hidden = !data;
    for (const id of ["measuring", "keeping", "python"]) $$(id).hidden = data;
    $$("measuring").hidden = !MEASURED.includes(view);
    // tasks have sizes of their own: their boxes stand in the place of the settings
    for (const part of $$("settings").querySelectorAll("fieldset")) part.hidden = (part.id === "tasks") !== (view === "tasks");
    for (const id of ["shown", "more", "notes"]) $$(id).replaceChildren();
    $$("problem").textContent = "";
    refresh();
  }
  tabs.forEach((tab, k) => {
    tab.addEventListener("click", () => turnTo(tab.dataset.view));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(k + step + tabs.length) % tabs.length];
      next.focus();
      next.click();
    });
  });

  // ---- measuring ---------------------------------------------------------------------------------------------------------
  let offered = null, news = { running: false }, finished = null;
  function measureButton() {
    const { running, done = 0, total = 0, left = null, message } = news;
    $$("stop").hidden = !running;
    $$("progress").hidden = !running;
    $$("progress").value = total ? done / total : 0;
    const here = state.view === "surface" && !picked().includes(`${state.n}x${state.M}`);
    $$("measure").disabled = running || (!here && (!offered || !!offered.refused || !offered.missing));
    $$("measure").textContent = here ? `measure at n = ${state.n}, M = ${state.M}` : "measure";
    const rest = left === null ? "" : `, about ${Math.ceil(left)} s left`;
    let text = "";
    if (running) text = done ? `${done} of ${total} fits${rest}` : `${total} fits: starting (the first on a machine compile their loops, up to a minute)`;
    else if (message) text = message;
    else if (offered?.refused && !here) text = offered.refused;
    else if (offered && !here) text = offered.missing ? `${offered.missing} fits` : "all measured";
    $$("status").textContent = text;
  }
  const picked = () => (state.picks ? state.picks.split(",") : []);
  async function measure() {
    if (state.view === "surface" && !picked().includes(`${state.n}x${state.M}`)) {
      state.picks = [...picked(), `${state.n}x${state.M}`].slice(-12).join(",");
      remember();
    }
    const answer = await posted(`measure?${query()}`);
    $$("problem").textContent = answer.error ?? "";
    if (!answer.error) hear(answer);
  }
  $$("measure").addEventListener("click", measure);
  $$("stop").addEventListener("click", async () => {
    const answer = await posted("stop");
    if (!answer.error) hear(answer);
  });
  async function posted(path) {
    try {
      return await (await fetch(path, { method: "POST" })).json();
    } catch {
      return { error: "the server has gone: start `keyhole explore` again." };
    }
  }
  function hear(latest) {
    const more = latest.finished !== finished || (news.running && !latest.running);
    news = latest;
    if (more && finished !== null && state.view !== "data") {
      ask("shown", "view");
    }
    measureButton();
  }
  // every tab that is looked at asks how far the measurement is
  async function listen() {
    if (!document.hidden) {
      try {
        hear(await (await fetch("news")).json());
      } catch { /* the server has gone, which the next view says */ }
    }
    setTimeout(listen, news.running ? 300 : 2000);
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask("shown", "view"); });
  listen();

  function listenForClicks(plot) {
    if (plot.dataset.listens) return;
    plot.dataset.listens = "yes";
    plot.on("plotly_click", ({ points: [point] }) => {
      const chart = charts[plot.dataset.chart];
      const [n, heads] = [chart.columns[Math.round(point.x)], chart.index[Math.round(point.y)]].map((text) => text?.replaceAll(",", ""));
      if (!/^\d+$/.test(n) || !/^\d+$/.test(heads)) {
        $$("problem").textContent = "places with finitely many heads can be measured here; infinitely many are in the learning curves.";
        return;
      }
      Object.assign(state, { n, M: heads });
      setters.n();
      setters.M();
      measure();
    });
  }

  // ---- your data -------------------------------------------------------------------------------------------------------------
  async function look(file) {
    if (!file) return;
    $$("working").hidden = false;
    $$("problem").textContent = "";
    const names = new URLSearchParams({ name: file.name, set: $$("set-column").value, target: $$("target-column").value });
    let answer;
    try {
      answer = await (await fetch(`data?${names}`, { method: "POST", body: file })).json();
    } catch {
      answer = { error: "the table could not be sent: it is larger than is allowed, or the server has gone." };
    }
    $$("working").hidden = true;
    $$("file").value = "";
    if (state.view !== "data") return;
    $$("problem").textContent = answer.error ?? "";
    if (answer.error) return;
    $$("notes").replaceChildren(...listed(answer.notes));
    await show($$("shown"), answer);
  }
  $$("file").addEventListener("change", () => look($$("file").files[0]));
  addEventListener("dragover", (event) => { event.preventDefault(); $$("drop").classList.add("over"); });
  addEventListener("dragleave", () => $$("drop").classList.remove("over"));
  addEventListener("drop", (event) => {
    event.preventDefault();
    $$("drop").classList.remove("over");
    if (state.view !== "data") turnTo("data");
    look(event.dataTransfer.files[0]);
  });

  $$("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText($$("python").querySelector("code").textContent);
    $$("copy").textContent = "copied";
    setTimeout(() => { $$("copy").textContent = "copy the lines"; }, 1500);
  });
  addEventListener("popstate", () => location.reload());
  Object.values(setters).forEach((set) => set());
  showTarget();
  turnTo(tabs.some((tab) => tab.dataset.view === state.view) ? state.view : "curves");
})();
