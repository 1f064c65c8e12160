// The voting page. All text is set as text, never as HTML.
"use strict";

const RETRY_MS = 1000, MAX_RETRY_MS = 8000, WAIT_MS = 2000, DONE_MS = 5000;
const MIN_SMOOTH_WIDTH = 256;  // pixels; narrower images are enlarged with sharp pixels
const KEYS = {ArrowLeft: "left", ArrowRight: "right", ArrowDown: "tie", t: "tie", s: "skip",
              z: "undo", Backspace: "undo"};
const MESSAGES = {
  wait: "Waiting for the next images…",
  done: "All pairs have been answered. Thank you!",
  failed: "Image generation has failed; see the log of the server.",
};
const STORED = "flow_grpo.votes.";  // prefix in localStorage
const PENDING = STORED + "pending.";
const $ = id => document.getElementById(id);

let voter = "", token = "";
let queue = [];  // ballots to show; the first one is on screen
let shown = null;  // the ballot on screen, once its images are loaded
let lastVote = null;  // id of the vote that undo takes back
let counts = {answered: 0, left: 0};
let pending = [];  // votes and undos that the server has not confirmed, in order
let answered = new Set();  // ballots answered on this page
let fetching = false, sending = false, undoing = false;
let actions = 0;  // choices and undos so far: what was fetched before the last one is outdated
let wake = () => {};  // ends the pause before the next request
const images = new Map();  // URL on the server: promise of a blob URL

const sleep = ms => new Promise(done => setTimeout(done, ms));
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(16)),
                               byte => byte.toString(16).padStart(2, "0")).join("");

// Requests are repeated until the server answers; votes and undos have ids, so none counts twice.
async function request(path, options = {}) {
  for (let wait = RETRY_MS; ; wait = Math.min(2 * wait, MAX_RETRY_MS)) {
    try {
      const headers = {...options.headers};
      if (token) headers.Authorization = `Bearer ${token}`;
      const response = await fetch(path, {...options, headers});
      if (response.status < 500) {
        $("connection").hidden = true;
        return response;
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;  // TypeError: no connection
    }
    $("connection").textContent = "No connection. Your votes are saved and will be sent later.";
    $("connection").hidden = false;
    await sleep(wait);
  }
}

async function requestJson(path, options) {
  for (;;) {
    const response = await request(path, options);
    try {
      const content = await response.json();
      if (response.ok) return content;
      if (response.status === 401) {
        token = "";
        localStorage.removeItem(STORED + "token");
        say("Open the link that you were given. It contains the access token.");
        await new Promise(() => {});  // until the page is opened again
      }
      return {error: content.error || {message: response.statusText}};
    } catch (error) {  // the connection broke within the answer
      await sleep(RETRY_MS);
    }
  }
}

const post = (path, body) => requestJson(path, {
  method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)});

function loadImage(url) {
  if (!images.has(url)) {
    images.set(url, (async () => {
      for (;;) {
        try {
          const response = await request(url);
          if (!response.ok) throw new Error(`${url}: ${response.status}`);
          const image = new Image();
          image.src = URL.createObjectURL(await response.blob());
          await image.decode();
          return image;
        } catch (error) {
          await sleep(RETRY_MS);
        }
      }
    })());
  }
  return images.get(url);
}

const urlsOf = ballot => [...ballot.images.map(each => each.url), ...ballot.sources];

// Release the images that no ballot in the queue needs.
function releaseImages() {
  const needed = new Set(queue.flatMap(urlsOf));
  for (const [url, loading] of images) {
    if (!needed.has(url)) {
      images.delete(url);
      loading.then(image => URL.revokeObjectURL(image.src));
    }
  }
}

function say(text) {
  $("message").textContent = text;
  $("ballot").hidden = $("actions").hidden = true;
}

function showProgress() {
  const unsent = pending.filter(each => each.path === "api/vote").length;
  const done = counts.answered + unsent, left = Math.max(0, counts.left - unsent);
  $("progress").textContent = `${done} answered, ${left} left`;
}

function hideBallot() {
  shown = null;
  delete document.body.dataset.ballot;
  document.body.classList.add("loading");
}

// Show the first ballot of the queue once its images are loaded.
async function showBallot() {
  const ballot = queue[0];
  $("undo").disabled = !lastVote;
  if (!ballot || ballot === shown) return;
  hideBallot();
  const loaded = await Promise.all(urlsOf(ballot).map(loadImage));
  if (queue[0] !== ballot || shown === ballot) return;
  $("message").textContent = "";
  $("prompt").textContent = ballot.prompt;
  ["left", "right"].forEach((side, i) => {
    const image = $(side).querySelector("img");
    image.src = loaded[i].src;
    image.alt = `Image ${i + 1} (${side}): ${ballot.prompt}`;
    image.classList.toggle("small", loaded[i].naturalWidth < MIN_SMOOTH_WIDTH);
  });
  $("sources").replaceChildren(...loaded.slice(2).map(each => {
    const image = new Image();
    image.src = each.src;
    image.alt = "Source image";
    image.classList.toggle("small", each.naturalWidth < MIN_SMOOTH_WIDTH);
    return image;
  }));
  $("sources").hidden = !ballot.sources.length;
  $("ballot").hidden = $("actions").hidden = false;
  document.body.classList.remove("loading");
  document.body.dataset.ballot = ballot.id;
  shown = ballot;
  releaseImages();
}

// Fetch ballots until the queue is full or the server has none.
async function refill() {
  if (fetching || !voter) return;
  fetching = true;
  while (voter && queue.length < 2) {
    await send();
    const asker = voter, before = actions;
    const next = await requestJson(`api/next?voter=${encodeURIComponent(asker)}`);
    if (asker !== voter || before !== actions) continue;
    if (next.error) { say(next.error.message); break; }
    counts = next.progress;
    lastVote = next.last;
    const known = new Set(queue.map(ballot => ballot.id));
    const fresh = next.ballots.filter(each => !known.has(each.id) && !answered.has(each.id));
    queue.push(...fresh);
    fresh.flatMap(urlsOf).forEach(loadImage);
    showProgress();
    showBallot();
    if (fresh.length) continue;
    if (queue.length) break;
    hideBallot();
    say(MESSAGES[next.state] || MESSAGES.wait);
    $("actions").hidden = !lastVote;
    $("undo").disabled = !lastVote;
    await new Promise(done => {
      wake = done;
      setTimeout(done, next.state === "done" ? DONE_MS : WAIT_MS);
    });
  }
  fetching = false;
}

// Send what is pending, in order. It is kept in localStorage until confirmed, so a reload or a
// closed tab loses nothing.
async function send() {
  while (sending) await sleep(20);
  sending = true;
  while (pending.length) {
    const {key, path, body} = pending[0];
    const answer = await post(path, body);
    if (answer.error) console.warn(answer.error.message);  // already answered, or withdrawn
    pending.shift();
    localStorage.removeItem(key);
  }
  sending = false;
}

function enqueue(path, body) {
  actions += 1;
  const key = PENDING + String(Date.now()).padStart(15, "0") + newId();
  localStorage.setItem(key, JSON.stringify({path, body}));
  pending.push({key, path, body});
}

function choose(action) {
  if (!voter || undoing) return;
  if (action === "undo") return undo();
  if (!shown) return;
  const index = ["left", "right"].indexOf(action);
  const choice = index < 0 ? action : shown.images[index].choice;
  lastVote = newId();
  answered.add(shown.id);
  enqueue("api/vote", {id: lastVote, ballot: shown.id, voter, choice});
  queue.shift();
  hideBallot();
  showProgress();
  showBallot();
  send().then(refill);
}

// Take back the last vote; the server then asks its ballot first.
async function undo() {
  if (!lastVote) return;
  undoing = true;
  $("undo").disabled = true;
  enqueue("api/undo", {voter, vote: lastVote});
  lastVote = null;
  queue = [];
  hideBallot();
  await send();
  answered.clear();
  undoing = false;
  wake();
  refill();
}

function start(name) {
  voter = name.trim();
  localStorage.setItem(STORED + "voter", voter);
  $("login").hidden = true;
  $("voter").hidden = false;
  $("voter").textContent = voter;
  $("voter").setAttribute("aria-label", `Voting as ${voter}; change the name`);
  queue = [];
  lastVote = null;
  hideBallot();
  answered.clear();
  say(MESSAGES.wait);
  $("prompt").focus();
  refill();
}

function askName() {
  voter = "";
  say("");
  $("login").hidden = false;
  $("name").value = localStorage.getItem(STORED + "voter") || "";
  $("name").focus();
}

function readToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    localStorage.setItem(STORED + "token", given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return localStorage.getItem(STORED + "token") || "";
}

function main() {
  token = readToken();
  const keys = Object.keys(localStorage).filter(key => key.startsWith(PENDING)).sort();
  pending = keys.map(key => ({key, ...JSON.parse(localStorage.getItem(key))}));
  for (const action of ["left", "right", "tie", "skip", "undo"])
    $(action).addEventListener("click", () => choose(action));
  $("login").addEventListener("submit", event => {
    event.preventDefault();
    if ($("name").value.trim()) start($("name").value);
  });
  $("voter").addEventListener("click", askName);
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
    const action = KEYS[event.key] || KEYS[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();  // scrolling, going back
    if (!event.repeat) choose(action);
  });
  const name = localStorage.getItem(STORED + "voter");
  if (name) start(name); else askName();
}

main();
