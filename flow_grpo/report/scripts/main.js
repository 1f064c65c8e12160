// The user's choices, which survive new data.
const state = { epoch: null, follow: true, smoothing: 0, kind: "eval", group: null };
const POLL = 2000; // milliseconds

function draw(data, live) {
  drawHead(data, live);
  drawVerdict(data);
  drawSummary(data);
  drawSamples(data);
  drawCurves(data);
  drawConfig(data);
}

async function follow(version) {
  const setStatus = (text, on) => { const node = byId("live"); node.textContent = text; node.classList.toggle("lost", !on); };
  try {
    const response = await fetch(`data.json?have=${encodeURIComponent(version)}`);
    if (response.status === 200) {
      const data = await response.json(), focused = document.activeElement && document.activeElement.id;
      version = data.version;
      draw(data, true);
      if (focused && byId(focused)) byId(focused).focus({ preventScroll: true });
    }
    setStatus("following the run", response.ok);
  } catch (error) {
    setStatus("no response: is report.py still running?", false);
  }
  setTimeout(() => follow(version), POLL);
}

const version = document.body.dataset.version;
draw(JSON.parse(byId("data").textContent), Boolean(version));
if (version) setTimeout(() => follow(version), POLL);
