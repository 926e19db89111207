// The page of a plan: the table chooses a schedule, whose timeline, memory and messages are drawn.
const GIB = 2 ** 30, FEW_MESSAGES = 1000; // more in view would hide the boxes
const {plan, columns, ops, timelines} = data;
let order = plan.schedules.map((_, row) => row); // rows as they are sorted
let selected = plan.schedules.findIndex((row) => row.schedule === data.shown);
let sorting = {name: "tokens/s/GPU", sign: -1};
let current = null; // the selected timeline, as `arrange` returns it
let hovered = null; // the box under the pointer

// Boxes, memory and messages of a timeline; computed when it is first shown.
const arrange = (timeline) => (timeline.arranged ??= {
  ...timeline, ...arrangeBoxes(timeline), curves: timeline.ranks.map((rank) => curveOf(rank, timeline)),
});

function arrangeBoxes(timeline) {
  const made = new Map(), rows = timeline.ranks.map((cells, rank) => cells.flatMap((cell) => {
    const parts = (cell.length - 2) / 3;
    return Array.from({length: parts}, (_, part) => {
      const [op, stage, microbatch] = cell.slice(2 + 3 * part, 5 + 3 * part);
      const mirrored = timeline.mirrored_from !== null && microbatch >= timeline.mirrored_from;
      const chunk = timeline.chunks[stage] + mirrored * timeline.stored_chunks;
      const box = {rank, start: cell[0], end: cell[1], op: ops[op], stage, microbatch, chunk, part, parts};
      made.set(keyOf(box.op.name, stage, microbatch), box);
      return box;
    });
  }));
  const boxes = rows.flat(), messages = [];
  for (const sender of boxes) {
    const receiver = made.get(readerOf(sender));
    if (receiver && receiver.rank !== sender.rank) messages.push({sender, receiver});
  }
  const lightest = Math.max(1, ...boxes.map((box) => box.chunk));
  return {rows, boxes, messages, lightest, end: Math.max(...boxes.map((box) => box.end))};
}

// F sends to F of the next stage; B and BW send to B or BW of the stage before; W sends nothing.
const keyOf = (name, stage, microbatch) => `${name[0]}/${stage}/${microbatch}`;
const readerOf = ({op, stage, microbatch}) =>
  "FB".includes(op.name[0]) ? keyOf(op.name, stage + (op.name === "F" ? 1 : -1), microbatch) : "";

// [time, bytes] wherever the live bytes of a rank change: F allocates at its start, gradients
// change them at their end. The state of a sequence's slices lives from its first F to its last B.
function curveOf(cells, {memory, slices}) {
  const points = [[0, 0]];
  let live = 0;
  const change = (time, bytes) => points.push([time, (live += bytes)]);
  for (const [start, end, ...actions] of cells) {
    for (let i = 0; i < actions.length; i += 3) {
      const {name} = ops[actions[i]], slice = actions[i + 2] % slices, last = slices - 1;
      const splits = name[0] === "B";
      if (name === "F") change(start, memory.F + (slice === 0) * memory.state);
      if (splits && slice === last) change(start, memory.state);
      if (splits) change(end, memory.B + (name === "BW") * memory.W - (slice === 0) * 2 * memory.state);
      if (name === "W") change(end, memory.W);
    }
  }
  return points;
}

const colours = new Map();
function fillOf({op, chunk}) { // later chunks and mirrored microbatches are lighter, as in a picture
  const key = `${op.name}${chunk}/${current.lightest}`;
  if (!colours.has(key)) {
    const lighter = (0.5 * chunk) / current.lightest;
    const parts = op.colour.map((part) => Math.round(255 - (255 - part) * (1 - lighter)));
    const bright = [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => sum + w * (parts[i] / 255) ** 2.2, 0);
    colours.set(key, {fill: `rgb(${parts})`, ink: bright < 0.18 ? "#fff" : "#000"});
  }
  return colours.get(key);
}

function rowHeight() { return Math.max(9, Math.min(28, 420 / current.ranks.length)); }
const middleOf = (rank) => (rank + 0.5) * rowHeight();

function drawRanks(context, chart) {
  const high = rowHeight(), {from, to} = view;
  context.textAlign = "right";
  const every = Math.ceil(13 / high);
  current.ranks.forEach((_, rank) => {
    context.fillStyle = colourOf("track");
    context.fillRect(LEFT, rank * high + 1, chart.inner, high - 2);
    context.fillStyle = colourOf("soft");
    if (rank % every === 0) context.fillText(`rank ${rank}`, LEFT - 6, middleOf(rank));
  });
  chart.inside(context, () => {
    for (const box of current.boxes) if (box.end >= from && box.start <= to) drawBox(context, chart, box, high);
    drawMessages(context, chart);
  });
}

function drawBox(context, chart, box, high) {
  const {fill, ink} = fillOf(box), part = (high - 2) / box.parts;
  const left = chart.x(box.start), width = chart.x(box.end) - left, top = box.rank * high + 1 + box.part * part;
  context.globalAlpha = !hovered || box.microbatch === hovered.microbatch ? 1 : 0.18;
  context.fillStyle = fill;
  context.fillRect(left, top, width - (width > 4 ? 1 : 0), part);
  if (part >= 11 && width > 7 * String(box.microbatch).length + 3) {
    context.fillStyle = ink;
    context.textAlign = "center";
    context.fillText(box.microbatch, left + width / 2, top + part / 2 + 0.5);
  }
  context.globalAlpha = 1;
}

function drawMessages(context, chart) {
  const seen = current.messages.filter(({sender, receiver}) => sender.end <= view.to && receiver.start >= view.from);
  const drawn = hovered ? seen.filter(({sender}) => sender.microbatch === hovered.microbatch) : seen;
  if (!hovered && (!shows.checked || seen.length > FEW_MESSAGES)) return;
  context.strokeStyle = colourOf("ink");
  context.lineWidth = hovered ? 1.5 : 0.6;
  context.beginPath();
  for (const {sender, receiver} of drawn) {
    context.moveTo(chart.x(sender.end), middleOf(sender.rank));
    context.lineTo(chart.x(receiver.start), middleOf(receiver.rank));
  }
  context.stroke();
}

function drawMemory(context, chart) {
  const bottom = chart.height - 20, most = Math.max(...current.curves.map(peakOf)), stored = storedBytes();
  const y = chart.vertical(context, 0, (Math.max(most, stored) * 1.08) / GIB || 1, bottom, "GiB");
  chart.horizontal(context, current.unit * timeScale().per, `time [${timeScale().name}]`, bottom);
  chart.inside(context, () => {
    context.setLineDash([5, 4]);
    context.strokeStyle = colourOf("soft");
    context.strokeRect(LEFT - 9, y(stored / GIB), chart.inner + 18, 0);
    context.setLineDash([]);
    current.curves.forEach((points, rank) => {
      context.strokeStyle = colourOfRank(rank, current.curves.length);
      context.lineWidth = 1.4;
      context.beginPath();
      points.forEach(([time, bytes], i) => {
        if (i) context.lineTo(chart.x(time), y(points[i - 1][1] / GIB));
        context.lineTo(chart.x(time), y(bytes / GIB));
      });
      context.stroke();
    });
  });
}

const peakOf = (points) => Math.max(...points.map(([, bytes]) => bytes));
const storedBytes = () => plan.schedules[selected].bytes.activations;

function timeScale() {
  const seconds = current.unit * (view.to - view.from);
  return seconds > 2 ? {per: 1, name: "s"} : seconds > 2e-3 ? {per: 1e3, name: "ms"} : {per: 1e6, name: "µs"};
}
const formatTime = (time) => `${significant(time * current.unit * timeScale().per, 5)} ${timeScale().name}`;
const labelOf = ({op, microbatch, stage}) => `${op.name}${microbatch}@${stage}`;

function hoverRanks(time, y) {
  const rank = Math.floor(y / rowHeight()), row = time === null ? [] : current.rows[rank] ?? [];
  const share = y / rowHeight() - rank;
  const before = hovered;
  hovered = row.find((box) => box.start <= time && time < box.end && Math.floor(share * box.parts) === box.part) ?? null;
  if (hovered?.microbatch !== before?.microbatch) redraw();
  if (!hovered) return "";
  const {op, stage, microbatch, start, end} = hovered;
  const lines = [
    `${labelOf(hovered)}: ${op.what} of microbatch ${microbatch} in stage ${stage}, rank ${rank}`,
    `${formatTime(start)} to ${formatTime(end)}, takes ${formatTime(end - start)}`,
  ];
  for (const {sender, receiver} of current.messages) {
    if (sender === hovered) lines.push(`sends to rank ${receiver.rank}, read by ${labelOf(receiver)} after ${formatTime(receiver.start - end)}`);
    if (receiver === hovered) lines.push(`reads from rank ${sender.rank}, sent by ${labelOf(sender)}`);
  }
  return lines.join("\n");
}

function hoverMemory(time) {
  if (time === null || time < 0 || time > current.end) return "";
  const bytes = current.curves.map((points) => points.findLast(([at]) => at <= time)[1] / GIB);
  const shown = bytes.map((of, rank) => `rank ${rank}: ${significant(of)} GiB`);
  const more = shown.length > 16 ? [`and ${shown.length - 16} more`] : [];
  return [`at ${formatTime(time)}`, ...shown.slice(0, 16), ...more].join("\n");
}

function sortRows() {
  const {values} = columns.find(({name}) => name === sorting.name);
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : (a ?? -1) - (b ?? -1));
  const first = ({configured}) => configured ? 0 : 1; // what the others are compared with
  order = plan.schedules.map((_, row) => row).sort((a, b) =>
    first(plan.schedules[a]) - first(plan.schedules[b]) || sorting.sign * compare(values[a], values[b]));
  table.tHead.rows[0].replaceChildren();
  for (const {name, legend} of columns) {
    const cell = element(table.tHead.rows[0], "th", "", {title: legend});
    if (name === sorting.name) cell.ariaSort = sorting.sign < 0 ? "descending" : "ascending";
    element(cell, "button", name).onclick = () => {
      sorting = {name, sign: name === sorting.name ? -sorting.sign : name === "schedule" ? 1 : -1};
      sortRows();
    };
  }
  table.tBodies[0].replaceChildren(...order.map((row) => lines[row]));
}

function lineOf({schedule, fits, configured}, row) {
  const line = document.createElement("tr");
  line.className = [schedule === plan.best ? "best" : "", fits ? "" : "misfit", configured ? "configured" : ""].join(" ");
  for (const {name, texts} of columns) {
    const marked = texts[row] + (name === "GiB" && !fits ? " !" : "");
    element(line, "td", marked, {className: name === "GiB" ? "total" : ""});
  }
  line.onclick = () => select(row);
  return line;
}

function select(row) {
  selected = row;
  hovered = null;
  current = arrange(timelines[row]);
  lines.forEach((line, i) => { line.ariaSelected = String(i === row); });
  lines[row].scrollIntoView({block: "nearest"});
  const peak = Math.max(...current.curves.map(peakOf)) / GIB;
  heading.textContent = `${plan.schedules[row].schedule}: ${current.boxes.length} actions, ${significant(current.end * current.unit)} s`;
  note.textContent = `Live residuals of each rank; most: ${significant(peak)} GiB. Dashed: what buffers and queued ` +
    `messages take on a device, ${significant(storedBytes() / GIB)} GiB.`;
  ranks.height = rowHeight() * current.ranks.length;
  listLinks();
  view.setWhole(0, current.end);
}

function listLinks() {
  const counts = new Map();
  for (const {sender, receiver} of current.messages) {
    const key = `${sender.rank} → ${receiver.rank}`, count = counts.get(key) ?? [sender.rank, 0, 0];
    count[sender.op.name === "F" ? 1 : 2]++;
    counts.set(key, count);
  }
  const listed = [...counts].sort(([, a], [, b]) => a[0] - b[0]);
  links.tBodies[0].replaceChildren();
  for (const [key, [, activations, gradients]] of listed) {
    const line = element(links.tBodies[0], "tr");
    const sent = significant(((activations + gradients) * current.message) / GIB);
    for (const text of [key, activations, gradients, sent]) element(line, "td", text);
  }
}

function choose(step) {
  const at = Math.max(0, Math.min(order.indexOf(selected) + step, order.length - 1));
  select(order[at]);
}

function makeTable(className, heads) {
  const made = element(element(main, "div", "", {className}), "table");
  const head = element(element(made, "thead"), "tr");
  heads.forEach((text) => element(head, "th", text));
  element(made, "tbody");
  return made;
}

const main = document.getElementById("main");
element(main, "p", data.summary, {className: "soft"});
const table = makeTable("scroll", []);
const lines = plan.schedules.map(lineOf);
const explained = element(main, "div", "", {className: "soft columns"});
for (const {name, legend} of columns) element(explained, "p", `${name}: ${legend}.`);
data.sentences.forEach((text) => element(main, "p", text, {className: "soft"}));
const heading = element(main, "h2");
const legend = element(main, "div", "", {className: "legend"});
for (const {name: op, what, colour} of ops.filter(({name: op}) => op !== "U")) {
  const entry = element(legend, "span");
  element(entry, "i").style.background = `rgb(${colour})`;
  entry.append(what);
}
element(legend, "span", "lighter: later chunks, or from the last rank");
const shows = element(element(legend, "label", "messages "), "input", "", {type: "checkbox", checked: true});
element(legend, "span", "↑ ↓ choose · + − zoom · ← → pan · 0 all · wheel, drag", {className: "soft"});
const redraw = oncePerFrame(() => { ranks.draw(); memory.draw(); });
const view = new View(redraw);
const ranks = new Chart(main, view, {height: 100, draw: drawRanks, hover: hoverRanks});
const memory = new Chart(main, view, {height: 170, draw: drawMemory, hover: hoverMemory});
const note = element(main, "p", "", {className: "soft"});
element(main, "h2", "messages between ranks in a step");
const links = makeTable("scroll", ["ranks", "activations", "gradients", "GiB"]);
shows.onchange = redraw;
sortRows();
select(selected);
redrawOnChange(redraw);
bindKeys(view, {ArrowUp: () => choose(-1), ArrowDown: () => choose(1)});
