// Curves: a small chart per metric, one line per run.

const GROUPS = [
  ["eval", "Evaluation", true],
  ["data", "Data", false],
  ["reward", "Rewards of training samples", true],
  ["train", "Training", true],
  ["time", "Seconds per phase", false],
  ["perf", "Speed and memory", false],
];
const WIDTH = 360, HEIGHT = 150, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const charts = []; // charts on the page: {details, draw}

// exponential moving average, corrected for its bias towards zero at the start
function smoothed(values, weight) {
  let mean = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

function niceTicks(low, high, count) {
  const least = 1e-300; // smaller steps have no representable power of ten
  if (high - low < least) {
    const margin = Math.abs(low) * 0.1;
    [low, high] = margin < least ? [0, 1] : [low - margin, high + margin];
  }
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++) ticks.push(i * step);
  return ticks;
}

function tickText(value, step) {
  if (Math.abs(value) < step / 1e6) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  const decimals = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return value.toFixed(decimals);
}

// most important first: total and rewards, then other metrics, then their components and settings
function metricRank(name) {
  const parts = name.split("/");
  if (parts[1] === "avg") return 0;
  const settings = ["lr", "noisy_from", "clip_range", "max_grad_norm", "loss_scale"];
  const minor = parts.length > 2 || ["failed", "samples", ...settings].includes(parts[1]);
  return minor ? 2 : 1;
}

function drawCurves(data) {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))]
    .filter((name) => data.runs.some((run) => run.metrics[name] && known(run.metrics[name]).length));
  const section = byId("curves"), wasOpen = new Map();
  for (const details of section.querySelectorAll("details")) wasOpen.set(details.dataset.group, details.open);
  charts.length = 0;
  const prefixes = [...new Set([...GROUPS.map(([prefix]) => prefix), ...names.map((name) => name.split("/")[0])])];
  const groups = prefixes.map((prefix) => {
    const own = names.filter((name) => name.startsWith(`${prefix}/`))
      .sort((a, b) => metricRank(a) - metricRank(b));
    if (!own.length) return null;
    const [, title, open] = GROUPS.find((group) => group[0] === prefix) || [prefix, prefix, false];
    const grid = el("div", { class: "charts" });
    const details = el("details", { "data-group": prefix },
      el("summary", {}, el("h3", { text: title }), el("span", { class: "quiet", text: plural(own.length, "curve") })),
      grid);
    details.open = wasOpen.has(prefix) ? wasOpen.get(prefix) : open;
    for (const name of own) grid.append(buildChart(data, name, details));
    details.addEventListener("toggle", redrawCurves);
    return details;
  });
  const slider = el("input", {
    type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: state.smoothing,
    oninput: (event) => { state.smoothing = Number(event.target.value); redrawCurves(); },
  });
  refill(section,
    el("div", { class: "bar" },
      el("h2", { id: "curves-title", text: "Curves" }),
      data.runs.length > 1 ? legend(data) : null,
      el("label", { class: "control", for: "smoothing" }, "Smoothing", slider)),
    ...groups.filter(Boolean));
  redrawCurves();
}

const legend = (data) => el("div", { class: "legend" },
  ...data.runs.map((run, index) => el("span", {}, runDot(index), run.name)));

let redrawing = 0;
function redrawCurves() {
  cancelAnimationFrame(redrawing);
  redrawing = requestAnimationFrame(() => {
    for (const chart of charts) if (chart.details.open) chart.draw();
  });
}

function buildChart(data, name, details) {
  const lines = data.runs.map((run, index) => {
    const values = run.metrics[name] || [];
    const points = values.map((value, i) => [run.epochs[i], value]).filter((point) => point[1] !== null);
    return { index, points };
  }).filter((line) => line.points.length);
  const all = lines.flatMap((line) => line.points);
  const xs = all.map((point) => point[0]), ys = all.map((point) => point[1]);
  const minimum = (list) => list.reduce((a, b) => Math.min(a, b)), maximum = (list) => list.reduce((a, b) => Math.max(a, b));
  const yTicks = niceTicks(minimum(ys), maximum(ys), 3), [low, high] = [yTicks[0], last(yTicks)];
  const first = minimum(xs), end = Math.max(maximum(xs), first + 1);
  const x = (epoch) => LEFT + (epoch - first) / (end - first) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const path = (points) => points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");

  const grid = yTicks.flatMap((tick) => [
    svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(tick) + 3.5, "text-anchor": "end", text: tickText(tick, yTicks[1] - yTicks[0]) }),
  ]);
  const xTicks = niceTicks(first, end, 5).filter((tick) => Number.isInteger(tick) && tick >= first && tick <= end);
  grid.push(...xTicks.map((tick) =>
    svg("text", { class: "tick", x: x(tick), y: HEIGHT - 5, "text-anchor": "middle", text: String(tick) })));
  const curves = lines.map((line) => {
    const raw = svg("path", { class: "raw", "data-run": line.index });
    const smooth = svg("path", { class: "smooth" });
    const dot = svg("circle", { class: "mark", r: 3.2, visibility: "hidden" });
    raw.style.stroke = smooth.style.stroke = dot.style.fill = runColour(line.index);
    return { ...line, raw, smooth, dot };
  });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const readout = el("span", { class: "readout" });
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${name} over epochs` },
    ...grid, cursor, ...curves.flatMap((line) => [line.raw, line.smooth, line.dot]));

  const showValues = (epoch) => {
    const parts = curves.map((line) => {
      const at = epoch === null ? line.points.length - 1 : nearest(line.points, epoch);
      const [when, value] = line.points[at];
      line.dot.setAttribute("visibility", epoch === null ? "hidden" : "visible");
      line.dot.setAttribute("cx", x(when));
      line.dot.setAttribute("cy", y(value));
      const text = el("span", { text: numberText(value) });
      if (curves.length > 1) text.style.color = runColour(line.index);
      return [when, text];
    });
    cursor.setAttribute("visibility", epoch === null ? "hidden" : "visible");
    cursor.setAttribute("x1", x(parts[0][0]));
    cursor.setAttribute("x2", x(parts[0][0]));
    readout.replaceChildren(
      ...(epoch === null ? [] : [el("span", { class: "quiet", text: `epoch ${parts[0][0]}` })]),
      ...parts.map((part) => part[1]));
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const position = (event.clientX - box.left) / box.width * WIDTH;
    showValues(first + (position - LEFT) / (WIDTH - LEFT - RIGHT) * (end - first));
  });
  chart.addEventListener("pointerleave", () => showValues(null));
  showValues(null);

  charts.push({
    details,
    draw: () => {
      for (const line of curves) {
        const on = state.smoothing > 0 && line.points.length > 2;
        const values = smoothed(line.points.map((point) => point[1]), state.smoothing);
        line.raw.setAttribute("d", line.points.length > 1 ? path(line.points) : `${path(line.points)}h0`);
        line.raw.classList.toggle("faint", on);
        line.raw.classList.toggle("single", line.points.length === 1);
        line.smooth.setAttribute("d", on ? path(line.points.map((point, i) => [point[0], values[i]])) : "");
      }
    },
  });
  return el("figure", { class: "chart", "data-metric": name }, el("figcaption", {}, el("span", { class: "name", text: name }), readout), chart);
}

function nearest(points, epoch) {
  let best = 0;
  points.forEach((point, i) => { if (Math.abs(point[0] - epoch) < Math.abs(points[best][0] - epoch)) best = i; });
  return best;
}
