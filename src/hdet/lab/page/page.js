"use strict";
// Draws what the page's data say. State is the theme, and per chart whether its axis is logarithmic; every change goes through draw(), which makes the figure anew from data and state.
(() => {
  const root = document.documentElement;
  const isCoarse = matchMedia("(pointer: coarse)").matches;
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const charts = new Map();
  for (const [index, div] of document.querySelectorAll(".plot").entries()) {
    const spec = specs[index];
    charts.set(div, { spec, isLog: spec.is_log === true, legendHeight: 0, isDrawn: false });
  }

  // --- colours ------------------------------------------------------------------------------------------
  const colorOf = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const paint = (value, key = "") => {
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map((entry) => paint(entry)) : value;
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, entry]) => [name, paint(entry, name)]));
    }
    return typeof value === "string" && value.startsWith("--") && key.endsWith("color") ? colorOf(value) : value;
  };

  // --- figures ------------------------------------------------------------------------------------------
  const pen = document.createElement("canvas").getContext("2d");
  const widthOf = (text) => {
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(text).width;
  };
  // A trace may say that it is a mark without numbers of its own, or that the axis need not reach it ("aside").
  const roleOf = (trace) => (trace.meta && trace.meta[1]) || "";

  const logRange = (traces, axis, maxDecades) => {
    const values = traces.filter((trace) => roleOf(trace) !== "aside").flatMap((trace) => trace[axis]).filter((v) => v > 0);
    if (!values.length) return [-1, 1];
    const high = Math.log10(values.reduce((a, b) => Math.max(a, b)));
    const low = Math.max(Math.log10(values.reduce((a, b) => Math.min(a, b))), maxDecades ? high - maxDecades : -Infinity);
    const room = 0.04 * (high - low) || 0.05;
    return [low - room, high + room];
  };
  const say = (value) => {
    if (value === 0 || (Math.abs(value) >= 0.01 && Math.abs(value) < 1e5)) return String(Number(value.toPrecision(6)));
    return Number(value.toPrecision(6)).toExponential().replace("e+", "e");
  };
  // Plotly labels the ticks between powers of ten by their first digit alone; these are whole numbers.
  const logTicks = ([low, high]) => {
    const values = [];
    if (high - low > 0.6) {
      const every = Math.max(1, Math.ceil((high - low) / 7));
      const firsts = high - low > 3.6 ? [1] : high - low > 1.5 ? [1, 3] : [1, 2, 5];
      for (let e = Math.floor(low); e <= high; e += every) for (const first of firsts) values.push(first * 10 ** e);
    } else {
      const [from, to] = [10 ** low, 10 ** high];
      const size = 10 ** Math.floor(Math.log10((to - from) / 4));
      const step = size * [1, 2, 5, 10].find((n) => n * size >= (to - from) / 5);
      for (let i = Math.ceil(from / step); i * step <= to; i += 1) values.push(i * step);
    }
    const seen = values.filter((v) => v >= 10 ** low && v <= 10 ** high);
    return { tickmode: "array", tickvals: seen, ticktext: seen.map(say) };
  };

  const axis = (title, more) => ({
    title: { text: title, standoff: 10, font: { size: 12, color: colorOf("--muted") } },
    gridcolor: colorOf("--grid"), linecolor: colorOf("--rule"), zerolinecolor: colorOf("--rule"),
    tickcolor: colorOf("--rule"), tickfont: { size: 11, color: colorOf("--muted") },
    ticks: "outside", ticklen: 4, automargin: true, zeroline: false, separatethousands: true, exponentformat: "e", ...more,
  });
  const figureOf = (chart, width) => {
    const { spec, isLog, legendHeight } = chart;
    const { traces } = spec;
    const isInOne = spec.hover === "x unified" && traces.length <= 12; // more would cover the chart
    const logAxis = (name, maxDecades) => {
      const range = logRange(traces, name, maxDecades);
      return { type: "log", range, ...logTicks(range) };
    };
    const x = spec.layout.xaxis && spec.layout.xaxis.type === "log" ? logAxis("x", 0) : {};
    const steps = spec.num_steps && !spec.layout.xaxis ? { range: [-0.02 * spec.num_steps, 1.02 * spec.num_steps] } : {};
    const y = isLog ? logAxis("y", spec.max_decades) : {};
    const entries = traces.filter((trace) => trace.showlegend !== false);
    const half = 0.499, inEntry = half * (width - 66) - 40; // 66 are the plot's margins, 40 a line's symbol
    const isInTwos = width < 480 && entries.length > 3 && entries.every((trace) => widthOf(trace.name) <= inEntry); // else they overlap
    const layout = {
      ...spec.layout,
      ...(root.dataset.printing ? { width } : { autosize: true }), height: spec.height + legendHeight, margin: { l: 52, r: 14, t: 8, b: 46 + legendHeight },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colorOf("--ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      hovermode: isInOne ? spec.hover : "closest", hoverdistance: 40, modebar: { bgcolor: "rgba(0,0,0,0)", color: colorOf("--replica"), activecolor: colorOf("--accent") },
      dragmode: isCoarse ? false : "zoom",
      hoverlabel: { bgcolor: colorOf("--surface"), bordercolor: colorOf("--rule"), align: "left", namelength: 40,
        font: { size: 12, color: colorOf("--ink") } },
      showlegend: entries.length > 1,
      legend: { orientation: "h", ...(isInTwos ? { entrywidth: half, entrywidthmode: "fraction" } : {}), xref: "container", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom",
        font: { size: 12, color: colorOf("--muted") }, bgcolor: "rgba(0,0,0,0)", itemsizing: "trace", tracegroupgap: 0, traceorder: "normal" },
      uirevision: `${isLog}`,
      xaxis: axis(spec.x_title, { nticks: width < 480 ? 5 : 10, ...steps, ...spec.layout.xaxis, ...x,
        unifiedhovertitle: { text: spec.x_title === "optimizer step" ? "step %{x:,}" : `${spec.x_title} %{x}` } }),
      yaxis: axis(spec.y_title, { nticks: 7, ...spec.layout.yaxis, ...y }),
    };
    // All traces in one label: their names are there already, and the step is its title.
    const inOne = (trace) => (trace.type === "scatter" && trace.hovertemplate ? { ...trace, hovertemplate: "%{y:.6~g} %{meta[0]}" } : trace);
    return [paint(isInOne ? traces.map(inOne) : traces), layout];
  };
  const config = {
    responsive: true, displaylogo: false, plotlyServerURL: "", showSendToCloud: false, showEditInChartStudio: false, showLink: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"], displayModeBar: isCoarse ? false : "hover",
  };

  const draw = (div) => {
    const chart = charts.get(div);
    const isNew = !chart.isDrawn;
    chart.isDrawn = true;
    Plotly.react(div, ...figureOf(chart, div.clientWidth), config);
    fitLegend(div);
    // They need a mouse to be of use, and would be four stops of the Tab key per chart.
    for (const button of div.querySelectorAll(".modebar button")) button.tabIndex = -1;
    if (isNew) div.on("plotly_relayout", (change) => follow(div, change));
    const numbers = div.closest("figure").querySelector(".numbers");
    if (numbers.open) fillNumbers(numbers);
  };
  // The legend stands below the plot and takes as many rows as it needs; the chart grows by them.
  const fitLegend = (div) => {
    const chart = charts.get(div);
    const legend = div.querySelector("g.legend .bg");
    const height = legend ? Math.ceil(legend.getBoundingClientRect().height) : 0;
    if (height === chart.legendHeight) return;
    chart.legendHeight = height;
    Plotly.relayout(div, { height: chart.spec.height + height, "margin.b": 46 + height });
  };
  // Ticks of a logarithmic axis follow a zoom.
  const follow = (div, change) => {
    for (const name of ["xaxis", "yaxis"]) {
      const full = div._fullLayout[name];
      const isZoom = Object.keys(change).some((key) => key.startsWith(`${name}.range`) || key.startsWith(`${name}.autorange`));
      if (!isZoom || full.type !== "log") continue;
      const ticks = logTicks(full.range);
      Plotly.relayout(div, { [`${name}.tickvals`]: ticks.tickvals, [`${name}.ticktext`]: ticks.ticktext });
    }
  };
  const isVisible = (div) => div.closest("details.run:not([open])") === null;
  const drawAll = (place = document, again = true) => {
    for (const div of place.querySelectorAll(".plot")) if (isVisible(div) && (again || !charts.get(div).isDrawn)) draw(div);
  };

  // --- numbers as tables --------------------------------------------------------------------------------
  const element = (tag, text = "", attributes = {}) => {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const plain = (text) => String(text).replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&#37;", "%").replaceAll("&amp;", "&");
  const rowsOf = (chart) => {
    const { spec } = chart;
    const traces = spec.traces.filter((trace) => roleOf(trace) !== "mark");
    if (spec.points) {
      const hasMore = traces.some((trace) => Array.isArray(trace.customdata));
      const rows = traces.flatMap((t) => t.x.map((x, i) => [t.name, x, t.y[i], ...(hasMore ? [t.customdata?.[i] ?? ""] : [])]));
      return [["what", spec.x_title, spec.y_title, ...(hasMore ? ["more"] : [])], rows];
    }
    const lookups = traces.map((trace) => new Map(trace.x.map((x, i) => [x, trace.y[i]])));
    const steps = [...new Set(traces.flatMap((trace) => trace.x))].sort((a, b) => a - b);
    return [[spec.x_title, ...traces.map((t) => t.name)], steps.map((x) => [x, ...lookups.map((lookup) => lookup.get(x) ?? "")])];
  };
  const fillNumbers = (details) => {
    const figure = details.closest("figure");
    const [head, rows] = rowsOf(charts.get(figure.querySelector(".plot")));
    const table = element("table");
    const top = table.createTHead().insertRow();
    for (const name of head) top.append(element("th", plain(name), { scope: "col" }));
    const body = table.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      for (const value of row) line.append(element("td", plain(value ?? "none"), typeof value === "string" && value ? {} : { class: "number" }));
    }
    const label = `Numbers of the chart ${figure.querySelector(".title").textContent}`;
    const scroll = element("div", "", { class: "scroll", tabindex: "0", role: "region", "aria-label": label });
    scroll.append(table);
    details.querySelector(".scroll")?.remove();
    details.append(scroll);
  };

  // --- what can be pressed ------------------------------------------------------------------------------
  for (const [div, chart] of charts) {
    const figure = div.closest("figure");
    const tools = figure.querySelector(".tools");
    if (chart.spec.is_log !== null) {
      const button = element("button", "Log", { type: "button", "aria-label": "Log scale", "aria-pressed": chart.isLog });
      button.addEventListener("click", () => {
        chart.isLog = !chart.isLog;
        button.setAttribute("aria-pressed", chart.isLog);
        draw(div);
      });
      tools.append(button);
    }
    figure.querySelector(".numbers").addEventListener("toggle", (event) => event.target.open && fillNumbers(event.target));
  }
  const nameTheme = () => {
    document.querySelector("#theme .what").textContent = root.dataset.theme === "dark" ? "Light" : "Dark";
  };
  const setTheme = (theme) => {
    root.dataset.theme = theme;
    nameTheme();
    drawAll();
  };
  document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
    if (!root.dataset.printing) setTheme(event.matches ? "dark" : "light"); // paper is light
  });

  for (const run of document.querySelectorAll("details.run")) {
    run.addEventListener("toggle", () => run.open && drawAll(run, false));
  }
  for (const button of document.querySelectorAll(".results thead button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const body = head.closest("table").tBodies[0];
      const key = (row) => row.children[head.cellIndex].dataset.value;
      const compare = (a, b) => (Number.isNaN(Number(a)) || Number.isNaN(Number(b)) ? a.localeCompare(b) : a - b);
      // What is unknown stays below, whichever way is up.
      body.append(...[...body.rows].sort((a, b) => (key(a) === "") - (key(b) === "") || sign * compare(key(a), key(b))));
    });
  }

  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { for (const [div, { isDrawn }] of charts) if (isDrawn && isVisible(div)) fitLegend(div); }, 200);
  });
  let before = null;
  addEventListener("beforeprint", () => {
    before = { theme: root.dataset.theme, closed: [...document.querySelectorAll("details.run:not([open])")] };
    for (const run of before.closed) run.open = true;
    root.dataset.printing = "true"; // as wide as paper
    setTheme("light");
  });
  addEventListener("afterprint", () => {
    for (const run of before.closed) run.open = false;
    delete root.dataset.printing;
    setTheme(before.theme);
  });
  // One chart at a time, so that the page can be used while the rest is drawn.
  const drawNext = () => {
    const next = [...charts.keys()].find((div) => isVisible(div) && !charts.get(div).isDrawn);
    if (next) draw(next);
    if (next) setTimeout(drawNext);
    else root.dataset.isDrawn = "true";
  };
  nameTheme();
  drawNext();
})();
