// Samples: how they change over epochs, the best and the worst, and one group.

const KINDS = { eval: "test prompts", train: "training samples" };
const VLM_KINDS = { eval: "test questions", train: "training responses" };
const EXTREMES = 4;

// index of the last epoch at or before the given one, else of the first; -1 if there are none
function indexOf(epochs, epoch) {
  let index = epochs.length ? 0 : -1;
  epochs.forEach((own, i) => { if (own <= epoch) index = i; });
  return index;
}

function at(run, kind, epoch) {
  const { epochs, samples, texts, sources } = run[kind], index = indexOf(epochs, epoch);
  if (index < 0) return { epoch: null, samples: [] };
  // no prototype: a reward may be named like a property of every object, such as "constructor"
  const own = (scores) => Object.assign(Object.create(null), scores);
  return { epoch: epochs[index], samples: samples[index].map((sample) => ({
    ...sample, prompt: texts[sample.prompt], scores: own(sample.scores), sources: (sample.sources || []).map((number) => sources[number]),
  })) };
}

// the same prompt may occur several times, each with its own noise
function byPrompt(samples) {
  const found = new Map(), seen = new Map();
  for (const sample of samples) {
    const number = seen.get(sample.prompt) || 0;
    seen.set(sample.prompt, number + 1);
    found.set(JSON.stringify([sample.prompt, number]), sample);
  }
  return found;
}

const scoreNames = (samples) => shownRewards([...new Set(samples.flatMap((sample) => Object.keys(sample.scores)))]);

function shownEpochs(data) {
  const of = (kind) => data.runs.flatMap((run) => run[kind].epochs);
  const epochs = of("eval").length ? of("eval") : of("train");
  return [...new Set(epochs)].sort((a, b) => a - b);
}

// whether the samples are responses of a VLM
const answered = (data) => data.runs.some((run) => Object.keys(KINDS).some((kind) =>
  run[kind].samples.some((own) => own.some((sample) => sample.answer !== undefined))));

const isAnswer = (sample) => Boolean(sample) && sample.answer !== undefined;
const kindsOf = (data) => (answered(data) ? VLM_KINDS : KINDS);

// halfway between the lowest and the highest reward of all responses on the page
let middle = null;
function findMiddle(data) {
  const samples = data.runs.flatMap((run) => Object.keys(KINDS).flatMap((kind) => run[kind].samples.flat()));
  const totals = known(samples.filter(isAnswer).map((sample) => sample.scores.avg));
  const low = totals.reduce((a, b) => Math.min(a, b), Infinity), high = totals.reduce((a, b) => Math.max(a, b), -Infinity);
  return low < high ? (low + high) / 2 : null;
}

function markOf(sample) {
  const value = sample.scores.avg;
  return middle === null || typeof value !== "number" ? "" : value > middle ? " good" : " bad";
}

function questionImage(src, alt) {
  const image = el("img", { class: "asked", src, alt, onload: () => image.classList.toggle("small", image.naturalWidth < 160) });
  return image;
}

// prompt and source images of an image; question, its image and the reference answer of a response
function headOf(sample, sources = sample.sources) {
  const asked = isAnswer(sample) ? [sample.image].filter(Boolean) : sources;
  const truth = sample.truth === undefined ? null
    : el("p", { class: "truth" }, el("span", { class: "quiet", text: "reference answer" }), el("span", { text: sample.truth, dir: "auto" }));
  const images = asked.length ? el("div", { class: "asked-for" }, ...asked.map((src) => questionImage(src, isAnswer(sample) ? sample.prompt : "source"))) : null;
  return [promptText(sample.prompt), images, truth];
}

function promptText(text) {
  const node = el("p", { class: "prompt", text, dir: "auto" });
  if (text.length < 70) return node;
  const whole = el("button", {
    class: "prompt", type: "button", "aria-expanded": "false", text, dir: "auto",
    onclick: () => whole.setAttribute("aria-expanded", String(whole.classList.toggle("whole"))),
  });
  return whole;
}

function buildSlot() {
  const image = el("img", { alt: "", onload: () => image.classList.toggle("small", image.naturalWidth < 160) });
  const video = el("video", { controls: "", loop: "", muted: "", playsinline: "", preload: "metadata" });
  const sound = el("audio", { controls: "", preload: "metadata" });
  const answer = el("p", { class: "answer", dir: "auto" });
  const nothing = el("p", { class: "nothing", text: "no image" });
  const label = el("p", { class: "label" }), scores = el("ul", { class: "scores" });
  const node = el("figure", { class: "slot" }, image, video, sound, answer, nothing, el("figcaption", {}, label, scores));
  return { node, image, video, sound, answer, nothing, label, scores };
}

function showMedia(node, src) {
  node.hidden = src === null;
  if (src === null) node.removeAttribute("src");
  else if (node.getAttribute("src") !== src) node.src = src;
}

function fillSlot(slot, sample, names, label, before) {
  const { image, video, sound, answer, scores } = slot;
  const shown = sample && sample.image && !isAnswer(sample) ? sample.image : null;
  const isVideo = shown !== null && shown.startsWith("data:video/");
  showMedia(image, isVideo ? null : shown);
  showMedia(video, isVideo ? shown : null);
  showMedia(sound, (sample && sample.audio) || null);
  if (shown) image.alt = sample.prompt;
  if (isVideo) video.setAttribute("aria-label", sample.prompt);
  answer.hidden = !isAnswer(sample);
  answer.textContent = isAnswer(sample) ? sample.answer : "";
  answer.className = `answer${isAnswer(sample) ? markOf(sample) : ""}`;
  slot.nothing.hidden = shown !== null || !answer.hidden;
  slot.label.replaceChildren(...label);
  scores.replaceChildren(...(sample ? names.map((name) => scoreLine(name, sample, before)) : []));
}

function scoreLine(name, sample, before) {
  const value = sample.scores[name], old = before && before.scores[name];
  const parts = Object.entries(sample.scores).filter(([part]) => part.startsWith(`${name}/`))
    .map(([part, number]) => `${part} ${scoreText(number)}`).join("\n");
  const moved = typeof value === "number" && typeof old === "number" ? value - old : 0;
  const difference = Math.abs(moved) < 0.005 && Math.abs(moved) < 0.05 * Math.abs(old || 0) ? 0 : moved;
  return el("li", { title: parts || null },
    el("span", { class: "quiet", text: name }),
    el("span", { class: value === null ? "failed" : "", text: scoreText(value) }),
    difference ? el("span", { class: difference > 0 ? "up" : "down", text: `${difference > 0 ? "+" : "−"}${scoreText(Math.abs(difference))}` }) : null);
}

function drawSamples(data) {
  const section = byId("samples"), epochs = shownEpochs(data);
  stopPlaying();
  middle = findMiddle(data);
  section.hidden = !epochs.length;
  if (!epochs.length) return;
  if (state.follow || !epochs.includes(state.epoch)) {
    state.epoch = state.epoch === null || state.follow ? last(epochs) : epochs[indexOf(epochs, state.epoch)];
  }
  const slider = el("input", {
    type: "range", id: "epoch", min: 0, max: epochs.length - 1, step: 1, value: epochs.indexOf(state.epoch),
    oninput: () => { stopPlaying(); show(Number(slider.value)); },
  });
  const shown = el("output", { for: "epoch", id: "epoch-shown" });
  const play = el("button", { type: "button", id: "play", text: "Play", onclick: () => startPlaying(slider, epochs, show) });
  const evolution = buildEvolution(data);
  const extremes = el("div", { id: "extremes" }), group = el("div", { id: "group" });
  function show(index) {
    state.epoch = epochs[index];
    state.follow = index === epochs.length - 1;
    shown.textContent = `epoch ${state.epoch}`;
    slider.setAttribute("aria-valuetext", shown.textContent);
    evolution.show(state.epoch);
    drawExtremes(data, extremes);
    drawGroup(data, group);
  }
  refill(section,
    el("div", { class: "bar sticky" },
      el("h2", { id: "samples-title", text: `How the ${answered(data) ? "responses" : "samples"} change` }),
      el("div", { class: "control grow" }, el("label", { for: "epoch", text: "Epoch" }), slider, shown, epochs.length > 1 ? play : null)),
    ...thinNotes(data), evolution.node, extremes, group);
  show(epochs.indexOf(state.epoch));
}

function thinNotes(data) {
  const notes = data.runs.flatMap((run) => Object.entries(kindsOf(data))
    .filter(([kind]) => run[kind].epochs.length < run[kind].of)
    .map(([kind, name]) => `${data.runs.length > 1 ? `${run.name}: ` : ""}${run[kind].epochs.length} of ${run[kind].of} epochs with ${name} are shown, to keep the page small; the run's samples directory has all of them.`));
  return notes.map((text) => el("p", { class: "quiet thinned", text }));
}

let playing = 0;
function stopPlaying() {
  clearInterval(playing);
  playing = 0;
  if (byId("play")) byId("play").textContent = "Play";
}

function startPlaying(slider, epochs, show) {
  if (playing) return stopPlaying();
  byId("play").textContent = "Stop";
  let index = Number(slider.value) === epochs.length - 1 ? -1 : Number(slider.value);
  playing = setInterval(() => {
    index += 1;
    slider.value = index;
    show(index);
    if (index === epochs.length - 1) stopPlaying();
  }, Math.max(150, Math.min(700, 8000 / epochs.length)));
}

// one run: its start next to the chosen epoch; several runs: the chosen epoch of each
function buildEvolution(data) {
  const several = data.runs.length > 1;
  const starts = data.runs.map((run) => ({ run, ...at(run, "eval", -1) }));
  const first = starts.map((start) => byPrompt(start.samples));
  const keys = [...new Set(first.flatMap((found) => [...found.keys()]))];
  const names = scoreNames(starts.flatMap((start) => start.samples));
  const pair = !several && starts[0].run.eval.epochs.length > 1;
  const edited = starts.some((start) => start.samples.some((sample) => sample.sources.length));
  const cards = keys.map((key) => {
    const slots = Array.from({ length: several ? data.runs.length : pair ? 2 : 1 }, buildSlot);
    const example = first.map((found) => found.get(key)).find(Boolean);
    const sources = example.sources.map((image) => {
      const slot = buildSlot();
      fillSlot(slot, { ...example, image }, [], ["source"]);
      return slot;
    });
    const node = el("article", { class: "card" }, ...headOf(example, []), el("div", { class: "slots" }, ...[...sources, ...slots].map((slot) => slot.node)));
    return { key, slots, node };
  });
  return {
    node: el("div", { class: several || edited || answered(data) ? "cards broad" : "cards", id: "evolution" }, ...cards.map((card) => card.node)),
    show(epoch) {
      const now = data.runs.map((run) => at(run, "eval", epoch));
      const found = now.map((each) => byPrompt(each.samples));
      for (const { key, slots } of cards) {
        if (pair) fillSlot(slots[0], first[0].get(key), names, [`start, epoch ${starts[0].epoch}`]);
        now.forEach((each, index) => {
          const slot = slots[pair ? 1 : index], sample = found[index].get(key);
          const when = each.epoch === null ? "no evaluation" : `epoch ${each.epoch}`;
          const label = several ? [runDot(index), `${data.runs[index].name}, ${when}`] : [when];
          fillSlot(slot, sample, names, label, each.epoch === starts[index].epoch ? null : first[index].get(key));
        });
      }
    },
  };
}

function chooser(id, label, options, chosen, onchange) {
  const select = el("select", { id, onchange: () => onchange(select.value) },
    ...options.map(([value, text]) => el("option", { value, text })));
  select.value = chosen;
  return el("label", { class: "control", for: id }, label, select);
}

function total(sample, names) {
  const value = sample.scores.avg === undefined ? sample.scores[names[0]] : sample.scores.avg;
  return typeof value === "number" ? value : null;
}

function sampleCard(sample, names, head) {
  const slot = buildSlot();
  fillSlot(slot, sample, names, []);
  if (sample.advantage !== undefined) slot.node.append(advantageBar(sample.advantage));
  return el("article", { class: "card one" }, ...head, el("div", { class: "slots" }, slot.node));
}

function drawExtremes(data, container) {
  const kinds = Object.entries(kindsOf(data)).filter(([kind]) => data.runs.some((run) => run[kind].epochs.length));
  if (!kinds.some(([kind]) => kind === state.kind)) state.kind = kinds[0][0];
  const rows = data.runs.flatMap((run, number) => {
    const { epoch, samples } = at(run, state.kind, state.epoch), names = scoreNames(samples);
    const ranked = samples.filter((sample) => total(sample, names) !== null).sort((a, b) => total(b, names) - total(a, names));
    const count = Math.min(EXTREMES, Math.floor(ranked.length / 2));
    if (!count) return [];
    const strip = (title, chosen) => el("div", { class: "strip" }, el("h4", { text: title }),
      el("div", { class: answered(data) ? "cards" : "cards small" }, ...chosen.map((sample) => sampleCard(sample, names, headOf(sample)))));
    return [el("div", {},
      el("p", { class: "quiet" }, data.runs.length > 1 ? runDot(number) : null, `${data.runs.length > 1 ? `${run.name}, ` : ""}epoch ${epoch}, ${kindsOf(data)[state.kind]}`),
      el("div", { class: "strips" }, strip("Best", ranked.slice(0, count)), strip("Worst", ranked.slice(-count).reverse())))];
  });
  container.hidden = !rows.length && kinds.length < 2;
  refill(container,
    el("div", { class: "bar" }, el("h3", { text: "Best and worst" }),
      kinds.length > 1 ? chooser("kind", "of", kinds, state.kind, (value) => { state.kind = value; drawExtremes(data, container); byId("kind").focus(); }) : null),
    ...rows);
}

function advantageBar(advantage) {
  const fillBar = el("span", { class: advantage < 0 ? "minus" : "plus" });
  fillBar.style.width = `${Math.min(50, Math.abs(advantage) * 25)}%`;
  return el("p", { class: "advantage" }, el("span", { class: "quiet", text: "advantage" }),
    el("span", { text: scoreText(advantage) }), el("span", { class: "scale", "aria-hidden": "true" }, fillBar));
}

// all samples of one prompt, from the training epoch at or before the slider's
function drawGroup(data, container) {
  const trained = data.runs.map((run, number) => ({ run, number, ...at(run, "train", state.epoch) })).filter((each) => each.samples.length);
  container.hidden = !trained.length;
  if (!trained.length) return;
  const groups = trained.map((each) => {
    const found = new Map();
    for (const sample of each.samples) {
      const key = sample.group === undefined ? sample.prompt : String(sample.group);
      found.set(key, [...(found.get(key) || []), sample]);
    }
    return [...found.values()];
  });
  const options = groups.flatMap((own, i) => own.map((samples, j) => {
    const { prompt, truth } = samples[0], short = prompt.length > 60 ? `${prompt.slice(0, 60)}…` : prompt;
    const label = truth === undefined ? short : `${short} (${truth})`;
    return [`${trained[i].number}/${j}`, data.runs.length > 1 ? `${trained[i].run.name}: ${label}` : label];
  }));
  if (!options.some(([value]) => value === state.group)) state.group = options[0][0];
  const [number, chosen] = state.group.split("/").map(Number), i = trained.findIndex((each) => each.number === number);
  const samples = [...groups[i][chosen]].sort((a, b) => (b.advantage || 0) - (a.advantage || 0)), names = scoreNames(samples);
  const { sample: settings = {}, train = {} } = trained[i].run.config;
  const size = 2 * (train.keep_best_worst || 0) || settings.num_image_per_prompt || settings.group_size;
  const [title, one, what] = isAnswer(samples[0]) ? ["One question, all responses", "Question", "response"] : ["One prompt, all samples", "Prompt", "sample"];
  const scores = samples.map((sample) => total(sample, names)).filter((value) => value !== null);
  const mean = scores.reduce((a, b) => a + b, 0) / scores.length;
  const spread = Math.sqrt(scores.reduce((sum, value) => sum + (value - mean) ** 2, 0) / scores.length);
  const facts = [`epoch ${trained[i].epoch}`, size > samples.length ? `${samples.length} of the ${size} ${what}s of this group` : plural(samples.length, what),
    scores.length ? `mean ${scoreText(mean)}, standard deviation ${scoreText(spread)}` : null,
    scores.length < samples.length ? `${samples.length - scores.length} failed` : null];
  refill(container,
    el("div", { class: "bar" }, el("h3", { text: title }),
      chooser("group-choice", one, options, state.group, (value) => { state.group = value; drawGroup(data, container); byId("group-choice").focus(); })),
    ...headOf(samples[0]),
    el("p", { class: "quiet", text: facts.filter(Boolean).join(" · ") }),
    el("div", { class: answered(data) ? "cards" : "cards small" }, ...samples.map((sample) => sampleCard(sample, names, []))));
}
