// The page of a run: one chart for each panel, over the steps that all charts show.
const main = document.getElementById("main");
data.summary.forEach((text) => element(main, "p", text));
if (data.config) {
  const folded = element(main, "details");
  element(folded, "summary", "configuration");
  element(folded, "pre", data.config);
}
element(main, "p", "+ − zoom · ← → pan · 0 all · wheel, drag · heights fit all steps but the first 5 % in view", {className: "soft"});
let pointed = null; // the step under the pointer
const charts = [];
const redraw = oncePerFrame(() => charts.forEach((chart) => chart.draw()));
const view = new View(redraw);

// Points in view, with one more on each side, so that lines reach the margins.
function inView({points}) {
  const first = points.findIndex(([step]) => step >= view.from);
  const last = points.findLastIndex(([step]) => step <= view.to);
  return points.slice(Math.max(0, (first < 0 ? points.length : first) - 1), last + 2);
}

function drawPanel(context, chart, {series}) {
  const lines = series.map(inView), values = lines.flat().map(([, value]) => value);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  // The first steps of a run are so high that the others would be a flat line: they are cut off.
  const settled = view.from + 0.05 * (view.to - view.from);
  const later = values.length > 40 ? lines.flat().filter(([step]) => step >= settled).map(([, value]) => value) : [];
  const high = (later.length ? later : values).reduce((a, b) => Math.max(a, b), -Infinity);
  const room = 0.05 * (high - low) || Math.abs(high) / 10 || 1, bottom = chart.height - 20;
  if (!values.length) return;
  const y = chart.vertical(context, low - room, high + room, bottom, "");
  chart.horizontal(context, 1, "step", bottom);
  chart.inside(context, () => {
    lines.forEach((points, i) => {
      context.strokeStyle = context.fillStyle = colourOfRank(i, series.length);
      context.lineWidth = 1.4;
      context.beginPath();
      for (const [step, value] of points) context.lineTo(chart.x(step), y(value));
      context.stroke();
      if (points.length < 60) {
        for (const [step, value] of points) context.fillRect(chart.x(step) - 2, y(value) - 2, 4, 4);
      }
    });
    if (pointed !== null) {
      context.fillStyle = colourOf("soft");
      context.fillRect(chart.x(pointed), 0, 1, bottom);
    }
  });
}

function nearest(points, step) {
  return points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
}

function hoverPanel(step, {series}) {
  pointed = step === null ? null : Math.round(Math.max(view.from, Math.min(step, view.to)));
  redraw();
  if (pointed === null) return "";
  return series.slice(0, 24).map(({label, points}) => {
    const [at, value] = nearest(points, pointed);
    return `${label}: ${significant(value, 5)} at step ${at}`;
  }).join("\n");
}

for (const panel of data.panels) {
  element(main, "h2", panel.title);
  const legend = element(main, "div", "", {className: "legend"});
  panel.series.forEach(({label}, i) => {
    const entry = element(legend, "span");
    element(entry, "i").style.background = colourOfRank(i, panel.series.length);
    entry.append(label);
  });
  charts.push(new Chart(main, view, {
    height: 170,
    draw: (context, chart) => drawPanel(context, chart, panel),
    hover: (step) => hoverPanel(step, panel),
  }));
}
const starts = data.panels.flatMap(({series}) => series.map(({points}) => points[0][0]));
view.setWhole(Math.min(data.steps, ...starts), Math.max(1, data.steps));
redrawOnChange(redraw);
bindKeys(view);
