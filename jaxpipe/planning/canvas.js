// What the pages share: elements, canvases with a horizontal axis that zooms, and the tip.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 70, RIGHT = 14; // margins of every canvas, in pixels
document.getElementById("title").textContent = document.title;

function element(parent, tag, text = "", properties = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  Object.assign(made, properties);
  parent.append(made);
  return made;
}

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function colourOfRank(rank, ranks) { // purple to green, which both themes show
  return `hsl(${280 - (170 * rank) / Math.max(1, ranks - 1)} 65% 46%)`;
}

function significant(value, digits = 3) {
  return Number(value.toPrecision(digits)).toLocaleString("en", {maximumFractionDigits: 9});
}

// Round numbers between two bounds, about `count` of them.
function ticks(from, to, count) {
  const raw = (to - from) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const found = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) found.push(k * step);
  return found;
}

function showTip(event, text) {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.style.visibility = text ? "visible" : "hidden";
  const {width, height} = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 4)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - height - 4)}px`;
}

// The interval of the horizontal axis that all canvases of a page show.
class View {
  constructor(redraw) {
    this.redraw = redraw;
    this.setWhole(0, 1);
  }

  setWhole(from, to) {
    Object.assign(this, {first: from, last: to, from, to});
    this.redraw();
  }

  zoom(factor, centre = (this.from + this.to) / 2) {
    const whole = this.last - this.first;
    const span = Math.min(whole, Math.max(whole / 5000, (this.to - this.from) / factor));
    const share = (centre - this.from) / (this.to - this.from);
    this.show(centre - share * span, span);
  }

  pan(share) {
    this.show(this.from + share * (this.to - this.from), this.to - this.from);
  }

  show(from, span) {
    this.from = Math.max(this.first, Math.min(from, this.last - span));
    this.to = this.from + span;
    this.redraw();
  }
}

// A canvas with the axis of a view: wheel and + - zoom, dragging pans, a double click shows all.
class Chart {
  constructor(parent, view, {height, draw, hover}) {
    this.canvas = element(parent, "canvas");
    Object.assign(this, {view, height, paint: draw});
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      view.zoom(1.0015 ** -event.deltaY, this.at(event.offsetX));
    }, {passive: false});
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) view.pan(-event.movementX / this.inner);
      else showTip(event, hover(this.at(event.offsetX), event.offsetY, event.offsetX));
    });
    this.canvas.addEventListener("pointerleave", (event) => showTip(event, hover(null) ?? ""));
    this.canvas.addEventListener("dblclick", () => view.setWhole(view.first, view.last));
  }

  get inner() { return this.canvas.clientWidth - LEFT - RIGHT; }
  x(value) { return LEFT + ((value - this.view.from) / (this.view.to - this.view.from)) * this.inner; }
  at(x) { return this.view.from + ((x - LEFT) / this.inner) * (this.view.to - this.view.from); }

  draw() {
    const ratio = devicePixelRatio || 1, width = this.canvas.clientWidth;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    context.textBaseline = "middle";
    this.paint(context, this, width);
  }

  // Clip to the part between the margins while `paint` draws.
  inside(context, paint) {
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, this.inner, this.height);
    context.clip();
    paint();
    context.restore();
  }

  // Numbers and grid lines of the vertical axis from 0 (or `low`) to `high`; returns value to pixel.
  vertical(context, low, high, bottom, name) {
    const y = (value) => bottom - ((value - low) / (high - low || 1)) * (bottom - 14);
    context.textAlign = "right";
    for (const value of ticks(low, high || 1, 4)) {
      context.fillStyle = colourOf("line");
      context.fillRect(LEFT, Math.round(y(value)), this.inner, 1);
      context.fillStyle = colourOf("soft");
      context.fillText(significant(value), LEFT - 6, y(value));
    }
    context.textAlign = "left";
    context.fillText(name, 2, 7);
    return y;
  }

  // Numbers of the horizontal axis, `scale` to a unit of the view, below `bottom`.
  horizontal(context, scale, name, bottom) {
    context.fillStyle = colourOf("soft");
    context.textAlign = "center";
    for (const value of ticks(this.view.from * scale, this.view.to * scale, this.inner / 110)) {
      context.fillText(significant(value, 6), this.x(value / scale), bottom + 10);
    }
    context.textAlign = "left";
    context.fillText(name, 2, bottom + 10);
  }
}

// Return a function that calls `draw` once before the next frame, however often it is called.
function oncePerFrame(draw) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => { waits = false; draw(); });
  };
}

// Redraw where the size or the colours of the page change.
function redrawOnChange(redraw) {
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

// The keys of a view; `more` are further keys with what they do.
function bindKeys(view, more = {}) {
  const keys = {
    "+": () => view.zoom(1.5), "=": () => view.zoom(1.5), "-": () => view.zoom(1 / 1.5),
    "0": () => view.setWhole(view.first, view.last),
    ArrowLeft: () => view.pan(-0.15), ArrowRight: () => view.pan(0.15), ...more,
  };
  addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
}
