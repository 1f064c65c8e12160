// Page of an evaluation of responses: a table and a chart per dataset, and the responses.

const PAGE_SIZE = 20; // questions
const FILTERS = {
  all: ["all questions", () => true],
  differ: ["candidates differ", (marks) => new Set(marks).size > 1],
  gained: ["gained: first candidate wrong, another correct", (marks) => marks[0] === 0 && marks.some((mark) => mark > 0)],
  lost: ["lost: first candidate correct, another wrong", (marks) => marks[0] > 0 && marks.some((mark) => mark === 0)],
  wrong: ["wrong for all candidates", (marks) => marks.every((mark) => mark === 0)],
};
const choice = { dataset: 0, filter: "all", page: 0 };

function drawTable({ header, rows }) {
  const line = (tag, cells) => el("tr", {}, ...cells.map((text) => el(tag, { text })));
  return el("div", { class: "scores-table" },
    el("table", {}, el("thead", {}, line("th", header)), el("tbody", {}, ...rows.map((row) => line("td", row)))));
}

// bars with their confidence intervals, a group for each column
function drawBars({ columns, candidates, values }) {
  const all = values.flat().flatMap((cell) => known([cell.mean, cell.low, cell.high]));
  if (!all.length) return null;
  const low = Math.min(0, ...all), high = Math.max(1e-9, low === 0 && Math.max(...all) <= 1.2 ? 1 : Math.max(...all));
  const bar = 18, gap = 26, left = 40, height = 150, top = 10;
  const widest = Math.max(0, ...columns.map((column) => column.length)) * 6 + 14;
  const group = Math.max(candidates.length * bar + gap, widest), width = left + Math.max(1, columns.length) * group;
  const y = (value) => top + height * (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low));
  const parts = [low, (low + high) / 2, high].map((value) => svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", text: numberText(value, 2) }));
  columns.forEach((column, c) => candidates.forEach((name, k) => {
    const cell = values[k][c], x = left + c * group + k * bar;
    if (cell.mean === null) return;
    const rect = svg("rect", { x, width: bar - 3, y: Math.min(y(cell.mean), y(0)), height: Math.abs(y(cell.mean) - y(0)) },
      svg("title", { text: `${name}, ${column}: ${numberText(cell.mean)}` }));
    rect.style.fill = runColour(k);
    parts.push(rect);
    const middle = x + (bar - 3) / 2;
    if (cell.low !== null) parts.push(svg("line", { x1: middle, x2: middle, y1: y(cell.low), y2: y(cell.high) }));
  }));
  columns.forEach((column, c) => parts.push(svg("text", { x: left + c * group, y: top + height + 16, text: column })));
  return svg("svg", { class: "bars", viewBox: `0 0 ${Math.max(width, 800)} ${height + 36}`, role: "img", "aria-label": "scores with 95% confidence intervals" }, ...parts);
}

function drawDataset(data, dataset) {
  const legend = el("div", { class: "legend" }, ...data.candidates.map((name, k) => el("span", {}, runDot(k), name)));
  return el("div", { class: "dataset" }, el("h2", { text: dataset.name }),
    el("p", { class: "quiet", text: `${plural(dataset.of, "question")}, ${data.sampling}` }),
    drawTable(dataset.table), legend, drawBars(dataset.chart));
}

// number of correct responses of each candidate; null without a score
const marksOf = (question) => question.responses.map((own) => {
  const scored = own.filter((each) => each.correct !== null);
  return scored.length ? scored.filter((each) => each.correct).length : null;
});

function drawResponse(each, names) {
  const mark = each.correct === null ? "" : each.correct ? " good" : " bad";
  const values = names.filter((name) => name in each.scores);
  return el("div", {}, el("p", { class: `answer${mark}`, text: each.answer, dir: "auto" }),
    el("ul", { class: "scores" }, ...values.map((name) => el("li", {}, el("span", { class: "quiet", text: name }), el("span", { text: scoreText(each.scores[name]) })))));
}

function drawQuestion(data, question) {
  const images = question.images.length ? el("div", { class: "asked-for" }, ...question.images.map((src) => el("img", { class: "asked", src, alt: "image of the question" }))) : null;
  const truth = question.truth === "" ? null : el("p", { class: "truth" }, el("span", { class: "quiet", text: "reference answer" }), el("span", { text: question.truth, dir: "auto" }));
  const columns = question.responses.map((own, k) => el("div", {}, el("h4", {}, runDot(k), data.candidates[k]), ...own.map((each) => drawResponse(each, data.rewards))));
  return el("div", { class: "card question" }, el("p", { text: question.prompt, dir: "auto" }), images, truth, el("div", { class: "columns" }, ...columns));
}

function selectOf(label, options, value, change) {
  const node = el("select", { "aria-label": label, onchange: () => { change(node.value); drawResponses(loaded); } },
    ...Object.entries(options).map(([key, text]) => el("option", { value: key, text, selected: key === String(value) })));
  return node;
}

function drawResponses(data) {
  const dataset = data.datasets[choice.dataset], [, test] = FILTERS[choice.filter];
  const found = dataset.questions.filter((question) => test(marksOf(question)));
  const pages = Math.max(1, Math.ceil(found.length / PAGE_SIZE));
  choice.page = Math.min(choice.page, pages - 1);
  const start = choice.page * PAGE_SIZE, turn = (step) => () => { choice.page += step; drawResponses(data); byId("responses").scrollIntoView(); };
  const sets = Object.fromEntries(data.datasets.map((each, i) => [i, each.name]));
  const filters = Object.fromEntries(Object.entries(FILTERS).map(([key, [text]]) => [key, text]));
  const note = dataset.questions.length < dataset.of ? ` (showing the first ${dataset.questions.length} of ${dataset.of}; samples.jsonl contains all)` : "";
  refill(byId("responses"),
    el("div", { class: "bar" }, el("h2", { id: "responses-title", text: "Responses" }),
      data.datasets.length > 1 ? selectOf("dataset", sets, choice.dataset, (value) => { choice.dataset = Number(value); choice.page = 0; }) : null,
      selectOf("filter", filters, choice.filter, (value) => { choice.filter = value; choice.page = 0; })),
    el("p", { class: "quiet", text: `${plural(found.length, "question")}${note}; correct: ${data.correct}` }),
    ...found.slice(start, start + PAGE_SIZE).map((question) => drawQuestion(data, question)),
    el("div", { class: "bar question" },
      el("button", { type: "button", text: "previous", disabled: choice.page === 0, onclick: turn(-1) }),
      el("span", { class: "quiet", text: `page ${choice.page + 1} of ${pages}` }),
      el("button", { type: "button", text: "next", disabled: choice.page >= pages - 1, onclick: turn(1) })));
}

const loaded = JSON.parse(byId("data").textContent);
refill(byId("head"), el("div", {}, el("h1", { text: loaded.title }), el("p", { class: "quiet", text: loaded.model })));
refill(byId("scores"), ...loaded.datasets.map((dataset) => drawDataset(loaded, dataset)), el("p", { class: "quiet", text: loaded.note }));
drawResponses(loaded);
refill(byId("foot"), el("p", { class: "quiet", text: `written ${loaded.made} by scripts/evaluate.py` }));
