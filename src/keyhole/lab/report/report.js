"use strict";
// Draws the figures of a page with plotly: their data come in the JSON element.
(() => {
  const { charts } = JSON.parse(document.getElementById("keyhole:data").textContent);
  const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] };

  async function draw(element) {
    const { data, layout } = charts[element.dataset.chart];
    if (!element.classList.contains("js-plotly-plot")) element.replaceChildren();
    await Plotly.react(element, data, layout, CONFIG);
  }

  // one after the other, so that the page can be read meanwhile
  async function drawAll() {
    for (const plot of document.querySelectorAll(".plot")) {
      await draw(plot);
      await new Promise((done) => setTimeout(done, 0));
    }
    document.documentElement.dataset.charts = "done";
  }
  drawAll();

  // the contents say what is being read
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const reading = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((link) => link.removeAttribute("aria-current"));
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-15% 0px -75% 0px" });
  document.querySelectorAll("main > section").forEach((section) => reading.observe(section));

  // a page whose charts change puts their figures here, then draws
  window.keyhole = { charts, draw };
})();
