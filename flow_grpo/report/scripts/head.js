// Header, health and summary at the top, and the config at the bottom.

const valueOf = (run, name) => known(run.metrics[name] || []);

function lastEpoch(run) {
  const planned = run.config.num_epochs, done = last(run.epochs);
  if (!planned) return plural(done, "epoch");
  return done >= planned ? `${plural(done, "epoch")}, finished` : `epoch ${done} of ${planned}`;
}

// a single reward's name is more informative than "avg"
function mainMetric(run, part) {
  const names = Object.keys(run.metrics).filter((name) => name.startsWith(`${part}/`)).map((name) => name.slice(part.length + 1));
  const rewards = names.filter((name) => names.includes(`${name}/std`));
  return rewards.length === 1 ? `${part}/${rewards[0]}` : `${part}/avg`;
}

function seconds(run) {
  const parts = Object.keys(run.metrics).filter((name) => name.startsWith("time/"))
    .map((name) => [name.slice(5), valueOf(run, name).reduce((a, b) => a + b, 0)]);
  return { total: parts.reduce((sum, part) => sum + part[1], 0), parts };
}

function drawHead(data, live) {
  const one = data.runs.length === 1 ? data.runs[0] : null;
  const facts = one
    ? [lastEpoch(one), one.config.algorithm, one.config.pretrained && one.config.pretrained.model, durationText(seconds(one).total)]
    : [plural(data.runs.length, "run")];
  refill(byId("head"),
    el("div", {},
      el("h1", { text: one ? one.name : data.runs.map((run) => run.name).join(" · ") }),
      el("p", { class: "quiet", text: facts.filter(Boolean).join(" · ") })),
    live ? el("p", { class: "live", id: "live", role: "status", text: "following the run" }) : null);
  refill(byId("foot"),
    el("p", { class: "quiet", text: `flow_grpo report, created ${data.made}. This file is self-contained: it can be moved, mailed and opened offline.` }));
}

function drawVerdict(data) {
  refill(byId("verdict"), ...data.runs.map((run, index) => {
    const { passed, not_applicable, findings } = run.health, trained = last(run.epochs) > 0;
    const rest = not_applicable.length ? `, ${not_applicable.length} not applicable` : "";
    const title = !trained ? "No epoch has been trained yet"
      : findings.length ? `${plural(findings.length, "health check")} failed, ${passed.length} passed${rest}`
        : passed.length ? `Healthy: ${plural(passed.length, "check")} passed${rest}` : "No health check applies";
    const kind = !trained || !(findings.length + passed.length) ? "wait" : findings.length ? "ill" : "well";
    return el("div", { class: `verdict ${kind}` },
      el("p", { class: "title" }, data.runs.length > 1 ? runDot(index) : null,
        data.runs.length > 1 ? `${run.name}: ${title}` : title),
      findings.length ? el("ul", {}, ...findings.map((finding) => el("li", {},
        el("p", {}, el("strong", { text: `Epoch ${finding.epoch}: ` }), `${finding.text}.`),
        el("p", { class: "advice", text: `What to change: ${finding.advice}.` })))) : null,
      trained && not_applicable.length ? el("p", { class: "quiet", text: `Not applicable, because the run does not log the metrics they need: ${not_applicable.join(", ")}.` }) : null);
  }));
}

function change(run, name) {
  const values = valueOf(run, name);
  if (!values.length) return null;
  return { first: values[0], last: last(values), several: values.length > 1 };
}

function bestOf(run, name) {
  const values = run.metrics[name] || [];
  let best = -1;
  values.forEach((value, i) => { if (value !== null && (best < 0 || value > values[best])) best = i; });
  return best < 0 ? null : { value: values[best], epoch: run.epochs[best] };
}

// data/held_out is the fraction of test prompts that are not in the training set
function evaluationTitle(run) {
  const shares = valueOf(run, "data/held_out"), share = shares.length ? last(shares) : 1;
  return share === 1 ? "Held-out reward" : share === 0 ? "Evaluation reward, on training prompts"
    : `Evaluation reward, ${Math.round(100 * share)}% of the prompts held out`;
}

function tile(title, found, note) {
  if (!found) return null;
  return el("div", { class: "tile" },
    el("p", { class: "quiet", text: title }),
    el("p", { class: "figure" },
      found.several ? el("span", { class: "from", text: `${numberText(found.first, 3)} → ` }) : null,
      el("span", { text: numberText(found.last, 3) })),
    el("p", { class: "quiet", text: note }));
}

function drawSummary(data) {
  refill(byId("summary"), data.runs.length > 1 ? summaryTable(data) : summaryTiles(data.runs[0]));
}

function summaryTiles(run) {
  const held = mainMetric(run, "eval"), best = bestOf(run, held), trained = mainMetric(run, "reward");
  const time = seconds(run), shares = [...time.parts].sort((a, b) => b[1] - a[1]).slice(0, 3)
    .map((part) => `${part[0]} ${Math.round(100 * part[1] / time.total)}%`).join(", ");
  return el("div", { class: "tiles" },
    tile(evaluationTitle(run), change(run, held), best ? `${held}, best ${numberText(best.value)} at epoch ${best.epoch}` : held),
    tile("Training reward", change(run, trained), `${trained}, first to last epoch`),
    tile("Diversity", change(run, "reward/diversity"), "distance between images of a prompt"),
    tile("Velocity norm", change(run, "train/norm_ratio"), "relative to the reference"),
    tile("Gated by KL", change(run, "train/gated"), "fraction of the samples"),
    el("div", { class: "tile" }, el("p", { class: "quiet", text: "Time" }),
      el("p", { class: "figure", text: durationText(time.total) }), el("p", { class: "quiet", text: shares })));
}

function summaryTable(data) {
  const head = ["run", "evaluation reward", "best", "training reward", "epochs", "time"];
  const pair = (found) => !found ? "-" : found.several ? `${numberText(found.first)} → ${numberText(found.last)}` : numberText(found.last);
  return el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...data.runs.map((run, index) => {
      const best = bestOf(run, mainMetric(run, "eval"));
      return el("tr", {}, el("th", { scope: "row" }, runDot(index), run.name),
        ...[pair(change(run, mainMetric(run, "eval"))), best ? `${numberText(best.value)} at epoch ${best.epoch}` : "-",
          pair(change(run, mainMetric(run, "reward"))), lastEpoch(run), durationText(seconds(run).total)].map((text) => el("td", { text })));
    }))));
}

function flat(values, prefix = "") {
  return Object.entries(values).flatMap(([name, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flat(value, `${prefix}${name}.`) : [[prefix + name, value]]);
}

function drawConfig(data) {
  const configs = data.runs.map((run) => new Map(flat(run.config).map(([name, value]) => [name, JSON.stringify(value)])));
  const names = [...new Set(configs.flatMap((config) => [...config.keys()]))].sort();
  const values = (name) => configs.map((config) => config.has(name) ? config.get(name) : "-");
  const different = names.filter((name) => new Set(values(name)).size > 1);
  const table = (chosen) => el("div", { class: "wide" }, el("table", { class: "fields" },
    data.runs.length > 1 ? el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "field" }),
      ...data.runs.map((run, index) => el("th", { scope: "col" }, runDot(index), run.name)))) : null,
    el("tbody", {}, ...chosen.map((name) => el("tr", {}, el("th", { scope: "row", text: name }),
      ...values(name).map((text) => el("td", { text })))))));
  const wasOpen = byId("config").querySelector("details[open]") !== null;
  const all = el("details", {}, el("summary", {}, el("h3", { text: "All fields" }), el("span", { class: "quiet", text: plural(names.length, "field") })), table(names));
  all.open = wasOpen;
  const several = data.runs.length > 1;
  refill(byId("config"),
    el("div", { class: "bar" }, el("h2", { id: "config-title", text: several ? "Differences between the runs" : "Config" })),
    ...(several ? [different.length ? fill(table(different), { id: "differences" }) : el("p", { class: "quiet", text: "All settings are equal." })] : []),
    all);
}
