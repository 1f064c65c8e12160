// What the user has chosen, which new data leaves as it is.
const state = { epoch: null, follow: true, smoothing: 0, kind: "eval", group: null };
const POLL = 2000; // milliseconds

function draw(data, live) {
  drawHead(data, live);
  drawVerdict(data);
  drawSummary(data);
  drawPictures(data);
  drawCurves(data);
  drawConfig(data);
}

async function follow(version) {
  const told = (text, on) => { const node = byId("live"); node.textContent = text; node.classList.toggle("lost", !on); };
  try {
    const answer = await fetch(`data.json?have=${encodeURIComponent(version)}`);
    if (answer.status === 200) {
      const data = await answer.json(), focused = document.activeElement && document.activeElement.id;
      version = data.version;
      draw(data, true);
      if (focused && byId(focused)) byId(focused).focus({ preventScroll: true });
    }
    told("following the run", answer.ok);
  } catch (error) {
    told("no answer: is report.py still running?", false);
  }
  setTimeout(() => follow(version), POLL);
}

const version = document.body.dataset.version;
draw(JSON.parse(byId("data").textContent), Boolean(version));
if (version) setTimeout(() => follow(version), POLL);
