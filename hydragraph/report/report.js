"use strict";
// Interactive features: colour themes, tabs, tooltips, choice of traffic kinds, and zoomable timelines.
// The page is complete without this script.

const TICKS = 1e9; // ticks of an iteration: times of bars are whole ticks
const root = document.documentElement;
const tip = document.getElementById("tip");

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function seconds(value, digits) {
  const units = [[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
  if (!value) return "0 s";
  const [unit, name] = units.find(([least]) => Math.abs(value) >= least * 0.9995) || units[units.length - 1];
  return Number((value / unit).toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 9 }) + " " + name;
}

function style(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

// Tooltip.

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = x + 14 + box.width > window.innerWidth - 8;
  tip.style.left = Math.max(8, right ? x - 14 - box.width : x + 14) + "px";
  tip.style.top = Math.max(8, Math.min(y + 16, window.innerHeight - box.height - 8)) + "px";
}

function hideTip() {
  tip.hidden = true;
}

function tips() {
  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  document.addEventListener("pointermove", (event) => {
    const marked = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    if (marked) showTip(marked.dataset.tip, event.clientX, event.clientY);
    else if (!(event.target instanceof HTMLCanvasElement)) hideTip();
  });
  document.addEventListener("scroll", hideTip, { passive: true });
}

// Colours.

const THEMES = [["", "Auto", "as in the system settings"], ["light", "Light", "light"], ["dark", "Dark", "dark"]];

function theme(redraw) {
  const button = document.getElementById("theme");
  const choose = (at) => {
    const [value, name, words] = THEMES[at];
    if (value) root.dataset.theme = value;
    else delete root.dataset.theme;
    button.textContent = name;
    button.setAttribute("aria-label", "Colours: " + words);
    button.onclick = () => choose((at + 1) % THEMES.length);
    try { localStorage.setItem("hydragraph-theme", value); } catch { /* storage may be unavailable for local files */ }
    redraw();
  };
  let kept = "";
  try { kept = localStorage.getItem("hydragraph-theme") || ""; } catch { /* storage is unavailable */ }
  button.hidden = false;
  choose(Math.max(0, THEMES.findIndex(([value]) => value === kept)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

// Tabs: one panel per strategy.

function tabs(shown) {
  const all = [...document.querySelectorAll("[role=tab]")];
  const choose = (at, focus) => {
    all.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === at));
      tab.tabIndex = i === at ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = i !== at;
    });
    if (focus) all[at].focus();
    shown();
  };
  all.forEach((tab, i) => {
    tab.addEventListener("click", () => choose(i, false));
    tab.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: all.length - 1 };
      if (!(event.key in steps)) return;
      event.preventDefault();
      choose((steps[event.key] + all.length) % all.length, true);
    });
  });
  if (all.length) choose(0, false);
}

// Traffic: choice of one kind or all.

function traffic() {
  const kinds = ["pull", "push", "p2p", "tp"];
  for (const group of document.querySelectorAll(".choose")) {
    group.hidden = false;
    const buttons = [...group.querySelectorAll("button")];
    const matrices = [...group.parentNode.querySelectorAll(".heat")];
    const choose = (button) => {
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
      const wanted = button.dataset.kind === "all" ? kinds : [button.dataset.kind];
      for (const matrix of matrices) {
        const cells = [...matrix.querySelectorAll("rect:not(.none)")];
        const sizes = cells.map((cell) => wanted.reduce((sum, kind) => sum + Number(cell.dataset[kind] || 0), 0));
        const most = Math.max(...sizes) || 1;
        cells.forEach((cell, i) => cell.setAttribute("fill-opacity", sizes[i] ? 0.08 + 0.92 * sizes[i] / most : 0.03));
      }
    };
    for (const button of buttons) button.addEventListener("click", () => choose(button));
  }
}

// Timelines.

const AXIS = 26; // height of the axis above the lanes, in pixels
const NARROWEST = 0.7; // minimum width of a bar, in pixels
const TALLEST = 560; // maximum height of a view before it scrolls, in pixels

class Timeline {
  constructor(place, course) {
    this.course = course;
    const tracks = course.tracks.map((streams) => streams.map(unpack));
    this.lanes = course.lanes.map(([ranks, count, what, track]) => ({ ranks, count, what, streams: tracks[track] }));
    this.row = Math.max(28, Math.min(46, 420 / this.lanes.length));
    this.from = 0;
    this.to = TICKS;
    this.critical = true;
    this.chosen = null;
    this.pointers = new Map();
    this.build(place);
  }

  build(place) {
    const button = (text, label, act) => {
      const made = element("button", { type: "button", textContent: text, onclick: act });
      made.setAttribute("aria-label", label);
      made.dataset.act = label;
      return made;
    };
    const tools = element("div", { className: "tools" },
      button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)),
      button("Fit", "whole iteration", () => this.range(0, TICKS)));
    if (this.course.critical.length) {
      const box = element("input", { type: "checkbox", checked: true });
      box.addEventListener("change", () => { this.critical = box.checked; this.draw(); });
      tools.append(element("label", {}, box, "critical path"));
    }
    tools.append(element("span", { className: "hint", textContent: "drag: move · Ctrl + wheel: zoom · arrows: next bar" }));
    this.canvas = element("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", `Timeline, ${this.course.title}: arrow keys select bars and ranks, plus and ` +
      "minus zoom, shift and arrow keys move the view, 0 shows everything");
    this.view = element("div", { className: "view" }, this.canvas);
    this.words = element("p", { className: "chosen" });
    this.words.setAttribute("aria-live", "polite");
    place.querySelector(".picture").before(tools, this.view, this.words);
    this.whole = AXIS + this.row * this.lanes.length + 6;
    this.top = 0; // scroll offset in pixels
    this.listen();
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY * 0.004), this.tick(event.offsetX));
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX || event.deltaY);
      else if (!this.scroll(event.deltaY)) return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
      this.moved = 0;
    });
    canvas.addEventListener("pointermove", (event) => this.move(event));
    const up = (event) => {
      if (this.pointers.delete(event.pointerId) && this.moved < 4 && event.type === "pointerup") {
        this.choose(this.at(event.offsetX, event.offsetY));
      }
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.tick(event.offsetX)));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.view);
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      const found = this.at(event.offsetX, event.offsetY);
      if (found) showTip(this.text(found), event.clientX, event.clientY);
      else hideTip();
      return;
    }
    hideTip();
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
    if (others.length) {
      const [x] = others[0];
      this.zoom(Math.max(1, Math.abs(before[0] - x)) / Math.max(1, Math.abs(event.offsetX - x)), this.tick(x));
    } else {
      this.moved += Math.abs(event.offsetX - before[0]) + Math.abs(event.offsetY - before[1]);
      this.pan(before[0] - event.offsetX);
      this.scroll(before[1] - event.offsetY);
    }
    this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
  }

  key(event) {
    const width = this.to - this.from;
    const acts = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.range(0, TICKS),
      Home: () => this.range(0, width), End: () => this.range(TICKS - width, TICKS),
      ArrowRight: () => (event.shiftKey ? this.range(this.from + width / 5, this.to + width / 5) : this.next(1)),
      ArrowLeft: () => (event.shiftKey ? this.range(this.from - width / 5, this.to - width / 5) : this.next(-1)),
      ArrowDown: () => this.other(1), ArrowUp: () => this.other(-1), Escape: () => this.choose(null),
    };
    if (!(event.key in acts) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  // The visible range.

  get left() { return this.canvas.clientWidth < 560 ? 74 : 132; }

  tick(x) { return this.from + (x - this.left) / (this.canvas.clientWidth - this.left) * (this.to - this.from); }

  x(tick) { return this.left + (tick - this.from) / (this.to - this.from) * (this.canvas.clientWidth - this.left); }

  range(from, to) {
    const width = Math.max(200, Math.min(TICKS, to - from));
    this.from = Math.max(0, Math.min(TICKS - width, from));
    this.to = this.from + width;
    this.draw();
  }

  zoom(factor, about) {
    const bar = this.chosen && this.bar(this.chosen);
    const inView = bar && bar.end > this.from && bar.begin < this.to;
    const middle = about ?? (inView ? (bar.begin + bar.end) / 2 : (this.from + this.to) / 2);
    const width = Math.max(200, Math.min(TICKS, (this.to - this.from) * factor));
    const part = (middle - this.from) / (this.to - this.from);
    this.range(middle - part * width, middle + (1 - part) * width);
  }

  pan(pixels) {
    const ticks = pixels / (this.canvas.clientWidth - this.left) * (this.to - this.from);
    this.range(this.from + ticks, this.to + ticks);
  }

  scroll(pixels) {
    const before = this.top;
    this.top = Math.max(0, Math.min(this.whole - this.height, this.top + pixels));
    if (this.top !== before) this.draw();
    return this.top !== before;
  }

  get height() { return Math.min(this.whole, TALLEST); }

  // Position of a stream's bars in a lane: [offset from the top, height].
  band(stream) {
    const thin = Math.max(2, Math.floor(this.row / 10));
    const wide = this.row - (this.course.streams.length - 1) * (thin + 1) - 6;
    return stream === 0 ? [2, wide] : [4 + wide + (stream - 1) * (thin + 1), thin];
  }

  // Bars, by lane, stream and number.

  bar({ lane, stream, i }) {
    const bars = this.lanes[lane].streams[stream];
    return { begin: bars.begin[i], end: bars.end[i], kind: bars.kind[i], name: bars.name[i], micro: bars.micro[i] };
  }

  at(x, y) {
    const lane = Math.floor((y - AXIS + this.top) / this.row);
    if (y < AXIS || x < this.left || lane < 0 || lane >= this.lanes.length) return null;
    const inside = y - AXIS + this.top - lane * this.row;
    const near = this.course.streams.map((_, stream) => {
      const [top, height] = this.band(stream);
      return [inside < top ? top - inside : Math.max(0, inside - top - height), stream];
    });
    near.sort((one, other) => one[0] - other[0]);
    const slack = 2 * (this.to - this.from) / (this.canvas.clientWidth - this.left);
    for (const [distance, stream] of near) {
      if (distance > 3) continue;
      const bars = this.lanes[lane].streams[stream];
      let best = null;
      for (let i = first(bars, this.tick(x) - slack); i < bars.length && bars.begin[i] <= this.tick(x) + slack; i++) {
        const away = Math.max(bars.begin[i] - this.tick(x), this.tick(x) - bars.end[i], 0);
        if (away <= slack && (best === null || away < best.away)) best = { lane, stream, i, away };
      }
      if (best) return best;
    }
    return null;
  }

  text(found) {
    const bar = this.bar(found);
    const lane = this.lanes[found.lane];
    const unit = this.course.seconds / TICKS;
    const micro = bar.micro >= 0 ? ` · micro-batch ${bar.micro}` : "";
    const critical = this.course.critical.some(([begin, length, at, stream]) => at === found.lane &&
      this.course.streams[found.stream] === stream && bar.begin < begin + length && bar.end > begin);
    return `${this.course.names[bar.name]}${micro}\nrank${lane.count > 1 ? "s" : ""} ${lane.ranks}` +
      `${lane.what ? ` · ${lane.what}` : ""} · ${this.course.streams[found.stream]}\n` +
      `${seconds((bar.end - bar.begin) * unit, 6)}, from ${seconds(bar.begin * unit, 6)} to ` +
      `${seconds(bar.end * unit, 6)}${critical ? "\non the critical path" : ""}`;
  }

  choose(found) {
    this.chosen = found;
    this.words.textContent = found ? this.text(found).replaceAll("\n", " · ") : "";
    if (found) {
      const bar = this.bar(found);
      const width = this.to - this.from;
      if (bar.end < this.from || bar.begin > this.to) {
        this.range((bar.begin + bar.end - width) / 2, (bar.begin + bar.end + width) / 2);
      }
      const y = found.lane * this.row;
      if (y < this.top) this.scroll(y - this.top);
      if (y + this.row + AXIS > this.top + this.height) this.scroll(y + this.row + AXIS - this.top - this.height);
    }
    this.draw();
  }

  next(step) {
    if (!this.chosen) return this.other(1);
    const { lane, stream, i } = this.chosen;
    const last = this.lanes[lane].streams[stream].length - 1;
    return this.choose({ lane, stream, i: Math.max(0, Math.min(last, i + step)) });
  }

  // The bar of another stream or lane that is closest in time.
  other(step) {
    const streams = this.course.streams.length;
    let row = this.chosen ? this.chosen.lane * streams + this.chosen.stream : -1;
    const time = this.chosen ? this.bar(this.chosen).begin : this.from;
    for (row += step; row >= 0 && row < this.lanes.length * streams; row += step) {
      const lane = Math.floor(row / streams);
      const bars = this.lanes[lane].streams[row % streams];
      if (bars.length) return this.choose({ lane, stream: row % streams, i: Math.min(bars.length - 1, first(bars, time)) });
    }
    return undefined;
  }

  // Drawing.

  draw() {
    const canvas = this.canvas;
    const width = this.view.clientWidth;
    if (!width) return;
    const height = this.height;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const colours = Object.fromEntries(["ink", "soft", "rule", "wash", "card", "critical"].map((name) => [name, style("--" + name)]));
    this.colour = this.course.kinds.map((kind) => style("--" + kind));
    this.font = style("--sans");
    const lowest = Math.min(this.lanes.length - 1, Math.floor((this.top + height - AXIS) / this.row));
    this.grid(pen, colours, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, width, height - AXIS);
    pen.clip();
    for (let lane = Math.floor(this.top / this.row); lane <= lowest; lane++) this.lane(pen, colours, lane, width);
    if (this.critical) this.path(pen, colours, width);
    if (this.chosen) this.mark(pen, colours);
    pen.restore();
    canvas.dataset.from = Math.round(this.from);
    canvas.dataset.to = Math.round(this.to);
  }

  y(lane) { return AXIS + lane * this.row - this.top; }

  grid(pen, colours, width, height) {
    const unit = this.course.seconds / TICKS;
    const raw = (this.to - this.from) * unit / Math.max(2, (width - this.left) / 120);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
    pen.font = `11.5px ${this.font}`;
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    for (let k = Math.ceil(this.from * unit / step); k * step <= this.to * unit; k++) {
      const x = this.x(k * step / unit);
      if (x < this.left - 0.5) continue;
      pen.strokeStyle = colours.rule;
      pen.beginPath();
      pen.moveTo(Math.round(x) + 0.5, AXIS);
      pen.lineTo(Math.round(x) + 0.5, height);
      pen.stroke();
      pen.fillStyle = colours.soft;
      const text = seconds(k * step, 9);
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(width - half - 4, Math.max(this.left + half, x)), AXIS / 2);
    }
  }

  lane(pen, colours, number, width) {
    const lane = this.lanes[number];
    const y = this.y(number);
    if (number % 2) {
      pen.fillStyle = colours.wash;
      pen.globalAlpha = 0.55;
      pen.fillRect(0, y, width, this.row);
      pen.globalAlpha = 1;
    }
    pen.save();
    pen.beginPath();
    pen.rect(this.left, y, width - this.left, this.row);
    pen.clip();
    lane.streams.forEach((bars, stream) => this.bars(pen, colours, bars, y + this.band(stream)[0], this.band(stream)[1]));
    pen.restore();
    pen.textAlign = "left";
    pen.font = `600 12px ${this.font}`;
    pen.fillStyle = colours.ink;
    const narrow = this.left < 100;
    const name = `${lane.count > 1 ? "ranks" : "rank"} ${lane.ranks}`;
    const two = lane.what && this.row >= 32 && !narrow;
    pen.fillText(short(pen, name, this.left - 16), 10, y + this.row / 2 - (two ? 7 : 1));
    if (two) {
      pen.font = `11px ${this.font}`;
      pen.fillStyle = colours.soft;
      pen.fillText(short(pen, lane.what, this.left - 16), 10, y + this.row / 2 + 7);
    }
  }

  bars(pen, colours, bars, y, height) {
    const reach = new Array(this.course.kinds.length).fill(-1);
    pen.textAlign = "center";
    pen.font = `11px ${this.font}`;
    for (let i = first(bars, this.from); i < bars.length && bars.begin[i] <= this.to; i++) {
      const kind = bars.kind[i];
      const x = this.x(bars.begin[i]);
      const end = this.x(bars.end[i]);
      if (end < reach[kind] + NARROWEST) continue; // already covered
      const wide = Math.max(NARROWEST, end - x - (end - x > 3 ? 1 : 0));
      pen.fillStyle = this.colour[kind];
      if (wide > 6 && height > 8) {
        pen.beginPath();
        pen.roundRect(x, y, wide, height, 2.5);
        pen.fill();
      } else pen.fillRect(x, y, wide, height);
      reach[kind] = x + wide;
      if (height < 12 || wide < 15) continue;
      const left = Math.max(x, this.left);
      const right = Math.min(x + wide, this.canvas.clientWidth);
      const micro = bars.micro[i] >= 0 ? String(bars.micro[i]) : "";
      const name = this.course.names[bars.name[i]];
      const long = micro ? `${name} [${micro}]` : name;
      const text = pen.measureText(long).width < right - left - 8 ? long : micro;
      if (!text || pen.measureText(text).width > right - left - 3) continue;
      pen.fillStyle = this.course.kinds[kind] === "wait" ? colours.ink : colours.card;
      pen.fillText(text, (left + right) / 2, y + height / 2 + 0.5);
    }
  }

  path(pen, colours, width) {
    pen.strokeStyle = colours.critical;
    pen.save();
    pen.beginPath();
    pen.rect(this.left - 1, 0, width - this.left + 1, this.height);
    pen.clip();
    let before = null;
    for (const [begin, length, lane, stream] of this.course.critical) {
      const [top, height] = this.band(this.course.streams.indexOf(stream));
      const y = this.y(lane) + top;
      const x = this.x(begin);
      const end = this.x(begin + length);
      if (before && end >= 0 && before[0] <= width && before[2] !== y) {
        pen.lineWidth = 1;
        pen.globalAlpha = 0.55;
        pen.beginPath();
        pen.moveTo(before[0], before[1]);
        pen.lineTo(x, y + height / 2);
        pen.stroke();
        pen.globalAlpha = 1;
      }
      pen.lineWidth = 1.6;
      if (end >= 0 && x <= width && end - x > 0.5) pen.strokeRect(x, y - 0.8, end - x, height + 1.6);
      before = [end, y + height / 2, y];
    }
    pen.restore();
  }

  mark(pen, colours) {
    const bar = this.bar(this.chosen);
    const [top, height] = this.band(this.chosen.stream);
    const x = Math.max(this.left, this.x(bar.begin));
    pen.strokeStyle = style("--accent");
    pen.lineWidth = 3;
    const end = this.x(bar.end);
    if (end >= this.left) pen.strokeRect(x - 1, this.y(this.chosen.lane) + top - 2, Math.max(2, end - x + 1), height + 4);
  }
}

function short(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let kept = text;
  while (kept.length > 1 && pen.measureText(kept + "…").width > width) kept = kept.slice(0, -1);
  return kept + "…";
}

// Encoded bars, concatenated: [ticks since the previous bar's end, ticks, kind, name, micro-batch].
function unpack(packed) {
  const length = packed.length / 5;
  const bars = { length, begin: new Float64Array(length), end: new Float64Array(length), reach: new Float64Array(length),
    kind: new Uint8Array(length), name: new Uint32Array(length), micro: new Int32Array(length) };
  let now = 0;
  for (let i = 0; i < length; i++) {
    bars.begin[i] = now + packed[5 * i];
    now = bars.end[i] = bars.begin[i] + packed[5 * i + 1];
    bars.reach[i] = Math.max(now, i ? bars.reach[i - 1] : 0);
    bars.kind[i] = packed[5 * i + 2];
    bars.name[i] = packed[5 * i + 3];
    bars.micro[i] = packed[5 * i + 4];
  }
  return bars;
}

// First bar that may end after a time. Bars of a stream may overlap, so the search uses running maxima of ends.
function first(bars, time) {
  let low = 0;
  let high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars.reach[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  root.classList.add("js");
  const timelines = [];
  for (const place of document.querySelectorAll(".timeline")) {
    timelines.push(new Timeline(place, data[place.dataset.panel][place.dataset.course]));
  }
  const redraw = () => timelines.forEach((timeline) => timeline.draw());
  tips();
  tabs(redraw);
  traffic();
  theme(redraw);
}

start();
