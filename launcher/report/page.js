"use strict";
(() => {
  // The scheme: the system's, until the button says otherwise.
  const root = document.documentElement, button = document.getElementById("theme");
  const schemes = ["", "light", "dark"];
  const set = (scheme) => {
    if (scheme) root.dataset.theme = scheme; else delete root.dataset.theme;
    button.textContent = { "": "scheme: system", light: "scheme: light", dark: "scheme: dark" }[scheme];
  };
  let kept = "";
  try { kept = localStorage.getItem("scheme") || ""; } catch { /* a page from a file may have no storage */ }
  set(schemes.includes(kept) ? kept : "");
  button.addEventListener("click", () => {
    const next = schemes[(schemes.indexOf(root.dataset.theme || "") + 1) % schemes.length];
    set(next);
    try { localStorage.setItem("scheme", next); } catch { /* as above */ }
  });

  // Values under the pointer, of the attempts that count.
  const source = document.getElementById("data");
  if (!source) return;
  const runs = JSON.parse(source.textContent).runs, tip = document.getElementById("tip");
  const charts = [...document.querySelectorAll("svg[data-metric]")];
  const order = new Map();
  const counted = (run, metric) => {
    const key = run.name + "\n" + metric;
    if (!order.has(key)) {
      const step = run.columns.step, values = run.columns[metric] || [];
      const found = [];
      for (let i = 0; i < step.length; i++) if (run.fates[i] === 0 && values[i] != null) found.push(i);
      order.set(key, found.sort((a, b) => step[a] - step[b]));
    }
    return order.get(key);
  };
  const nearest = (run, metric, at) => {
    const found = counted(run, metric), step = run.columns.step;
    let low = 0, high = found.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (step[found[middle]] < at) low = middle + 1; else high = middle;
    }
    if (low > 0 && at - step[found[low - 1]] < step[found[low]] - at) low--;
    return found.length ? found[low] : -1;
  };
  const words = (value, scale) =>
    typeof value === "number" ? String(Number((value * scale).toPrecision(6))) : String(value);
  const show = (event) => {
    const svg = event.currentTarget, own = svg.dataset, box = svg.getBoundingClientRect();
    const pixel = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const share = (pixel - own.left) / own.width;
    if (share < -0.02 || share > 1.02) return hide();
    const at = Number(own.x0) + Math.min(Math.max(share, 0), 1) * (own.x1 - own.x0);
    const lines = [];
    let step = null;
    for (const run of runs) {
      const index = nearest(run, own.metric, at);
      if (index < 0) continue;
      if (step === null) step = run.columns.step[index];
      const where = runs.length > 1 ? `${run.name} ` : "";
      lines.push(`${where}step ${run.columns.step[index]}: ${words(run.columns[own.metric][index], own.scale)}`);
    }
    if (step === null) return hide();
    tip.textContent = lines.join("\n");
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.max(event.clientY - tip.offsetHeight - 10, 4) + "px";
    for (const chart of charts) {
      const other = chart.dataset, cross = chart.querySelector(".cross");
      const x = Number(other.left) + (step - other.x0) / (other.x1 - other.x0) * other.width;
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.style.visibility = step < other.x0 || step > other.x1 ? "hidden" : "visible";
    }
  };
  const hide = () => {
    tip.style.display = "none";
    for (const chart of charts) chart.querySelector(".cross").style.visibility = "hidden";
  };
  for (const chart of charts) {
    chart.addEventListener("pointermove", show);
    chart.addEventListener("pointerleave", hide);
  }
})();
