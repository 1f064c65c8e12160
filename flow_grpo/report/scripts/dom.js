"use strict";
// Text of a run reaches the page through textContent and attributes only, never as HTML.

const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...(children || []).filter((child) => child !== null && child !== undefined));
  return node;
}

const refill = (node, ...children) => {
  node.replaceChildren();
  return fill(node, {}, children);
};
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// as in flow_grpo/report/grid.py: null is a failed score, undefined one that was not requested
function scoreText(value) {
  if (value === undefined) return "-";
  if (value === null) return "failed";
  const size = Math.abs(value);
  return size > 0 && size < 0.1 ? String(Number(value.toPrecision(2))) : value.toFixed(2);
}

function numberText(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function durationText(seconds) {
  if (seconds < 59.5) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const last = (list) => list[list.length - 1];
const known = (list) => list.filter((value) => value !== null && value !== undefined);

// rewards, with their total if there are several; components of a reward have a / in their names
function shownRewards(names) {
  const rewards = names.filter((name) => name !== "avg" && !name.includes("/"));
  return rewards.length === 1 ? rewards : [...rewards, ...names.filter((name) => name === "avg")];
}

const runColour = (index) => `var(--run-${index % 6})`;

function runDot(index) {
  const dot = el("span", { class: "dot", "aria-hidden": "true" });
  dot.style.background = runColour(index);
  return dot;
}
