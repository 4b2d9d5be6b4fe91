"use strict";
// What the page does by itself: theme, copy buttons, the parts of the bar, the chart over time with zoom and cursor, the
// ranks, sorting and filtering of runs; and, where a server feeds it, putting what is new in place.
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  let data = JSON.parse(byId("data").textContent);
  const NS = "http://www.w3.org/2000/svg";

  // Numbers as people write them.
  const figure = (value, digits = 4) => {
    if (value === null || value === undefined) return "unknown";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return size && size < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
  };
  const scaled = (value, steps, suffix) => {
    const [size, unit] = steps.find(([size]) => Math.abs(value) >= size) || steps[steps.length - 1];
    return `${figure(value / size, 3)} ${unit}${suffix}`;
  };
  const inUnit = (value, unit) => {
    if (value === null || value === undefined) return "unknown";
    if (unit === "1") return `${figure(100 * value, 3)} %`;
    if (unit === "s") {
      return value >= 7200 ? `${figure(value / 3600, 3)} h` : value >= 120 ? `${figure(value / 60, 3)} min`
        : value >= 1 || value === 0 ? `${figure(value, 3)} s` : value >= 1e-3 ? `${figure(1e3 * value, 3)} ms` : `${figure(1e6 * value, 3)} µs`;
    }
    if (unit) return scaled(value, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]], unit);
    return figure(value);
  };

  const element = (name, attributes, parent, text) => {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };

  // ---- the chart over time ----
  const LEFT = 64, RIGHT = 8, FEWEST = 8;
  let view = null; // first and last step in view; null: all
  let cursor = null; // the step under the cursor
  let plan = null; // how steps and values lie on the screen

  const extent = () => {
    let low = Infinity, high = -Infinity;
    for (const axis of data.axes) for (const step of axis) { if (step < low) low = step; if (step > high) high = step; }
    return low <= high ? [low, high] : [0, 1];
  };
  const inView = () => view || extent();

  const ticks = (low, high, num) => {
    const rough = (high - low) / num || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) || 10);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
    return found;
  };

  const range = (line, axis, low, high) => {
    const values = [];
    // Warm-up does not set the scale of speeds, unless there is nothing else to see.
    const rough = (step) => (line.unit === "1" || line.unit === "s") && (data.warmup || []).some(([first, last]) => step >= first && step <= last);
    const warm = axis.some((step) => step >= low && step <= high && !rough(step)) ? -Infinity : Infinity;
    for (let place = 0; place < axis.length; place++) {
      const step = axis[place];
      if (step < low || step > high || (step > warm && rough(step))) continue;
      for (const column of [line.mean, line.low, line.high]) if (column.length && column[place] !== null) values.push(column[place]);
    }
    if (!values.length) return null;
    values.sort((a, b) => a - b);
    const least = values[0], most = values[values.length - 1], middle = values[values.length >> 1];
    const isLog = line.unit === "s" && least > 0 && most > 20 * middle;
    if (isLog) return { isLog, low: Math.log10(least), high: Math.log10(most) };
    const fromZero = (line.panel ?? line.name) !== "Loss" && least >= 0;
    const pad = (most - (fromZero ? 0 : least)) * 0.06 || Math.abs(most) * 0.1 || 1;
    return { isLog, low: fromZero ? 0 : least - pad, high: most + pad };
  };

  const paths = (line, axis, x, y, low, high) => {
    let mean = "", isDown = false, last = -Infinity;
    const upper = [], bands = [];
    let lower = [];
    const close = () => {
      if (lower.length) bands.push(`M${upper.splice(0).join("L")}L${lower.reverse().join("L")}Z`);
      lower = [];
    };
    for (let place = 0; place < axis.length; place++) {
      const step = axis[place], value = line.mean[place];
      const isOut = step < low && (axis[place + 1] ?? step) < low || step > high && last > high;
      if (value === null || step < last || isOut) { isDown = false; close(); }
      last = step;
      if (value === null || isOut) continue;
      mean += `${isDown ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      isDown = true;
      if (line.low.length) {
        upper.push(`${x(step).toFixed(1)} ${y(line.high[place]).toFixed(1)}`);
        lower.push(`${x(step).toFixed(1)} ${y(line.low[place]).toFixed(1)}`);
      }
    }
    close();
    return { mean: isDown && !/L/.test(mean) ? `${mean}h.1` : mean, band: bands.join("") };
  };

  // Lines with one name of their own get a panel each; lines of several runs share one.
  const panels = () => {
    const found = new Map();
    for (const [place, line] of data.lines.entries()) {
      const name = line.panel ?? line.name;
      if (!found.has(name)) found.set(name, []);
      found.get(name).push([line, data.names ? line.run : Math.min(place, 7)]);
    }
    return [...found];
  };

  const draw = () => {
    const place = byId("chart");
    if (!place || !data || !data.lines) return;
    const width = Math.max(place.clientWidth, 240), [low, high] = inView();
    const x = (step) => LEFT + (width - LEFT - RIGHT) * (high > low ? (step - low) / (high - low) : 0.5);
    const shown = panels();
    const heights = shown.map((_, index) => (index ? 84 : 130)), gaps = shown.map((_, index) => (index ? 24 : 34));
    const total = heights.reduce((sum, height, index) => sum + height + gaps[index], 0) + 26;
    const svg = element("svg", { viewBox: `0 0 ${width} ${total}`, height: total, "aria-hidden": "true" });
    let top = 18;
    for (const [index, [name, lines]] of shown.entries()) {
      const height = heights[index];
      const clip = element("clipPath", { id: `panel${index}` }, svg);
      element("rect", { x: LEFT, y: top - 1, width: width - LEFT - RIGHT, height: height + 2 }, clip);
      const scales = lines.map(([line]) => range(line, data.axes[line.step], low, high)).filter(Boolean);
      element("text", { x: LEFT, y: top - 5, class: "name" }, svg, scales.some((scale) => scale.isLog) ? `${name} (logarithmic)` : name);
      for (const [first, last] of data.warmup || []) {
        const from = Math.max(x(first - 0.5), LEFT), to = Math.min(x(last + 0.5), width - RIGHT);
        if (to > from) element("rect", { x: from, y: top, width: to - from, height, class: "warmup" }, svg);
      }
      if (scales.length) {
        const isLog = scales.some((scale) => scale.isLog);
        const ends = scales.map((scale) => (isLog && !scale.isLog ? { low: Math.log10(Math.max(scale.low, 1e-9)), high: Math.log10(scale.high) } : scale));
        const least = Math.min(...ends.map((scale) => scale.low)), most = Math.max(...ends.map((scale) => scale.high));
        const onScale = (value) => top + height - (height * ((isLog ? Math.log10(Math.max(value, 1e-12)) : value) - least)) / (most - least || 1);
        const unit = lines[0][0].unit;
        for (const value of ticks(least, most, index ? 3 : 4)) {
          const level = top + height - (height * (value - least)) / (most - least || 1);
          element("line", { x1: LEFT, x2: width - RIGHT, y1: level, y2: level, class: "axis" }, svg);
          element("text", { x: LEFT - 6, y: level + 4, "text-anchor": "end" }, svg, inUnit(isLog ? 10 ** value : value, unit));
        }
        for (const [line, colour] of lines) {
          const { mean, band } = paths(line, data.axes[line.step], x, onScale, low, high);
          if (band) element("path", { d: band, class: `range s${colour % 8}`, "clip-path": `url(#panel${index})` }, svg);
          element("path", { d: mean, class: `mean s${colour % 8}`, "clip-path": `url(#panel${index})` }, svg);
        }
      }
      if (index === 0) marks(svg, x, top + height, low, high);
      top += height + gaps[index];
    }
    for (const step of ticks(low, high, Math.max(Math.floor(width / 110), 2)).filter(Number.isInteger)) {
      const at = x(step), anchor = at > width - 40 ? "end" : "middle";
      element("text", { x: at, y: total - 8, "text-anchor": anchor }, svg, figure(step));
    }
    element("line", { x1: LEFT, x2: LEFT, y1: 8, y2: total - 26, class: "cursor", visibility: "hidden" }, svg);
    element("rect", { x: LEFT, y: 8, width: 0, height: total - 34, class: "chosen" }, svg);
    place.replaceChildren(svg);
    plan = { svg, x, low, high, width, step: (at) => low + ((at - LEFT) / (width - LEFT - RIGHT)) * (high - low) };
    point(cursor);
    const zoomed = byId("window");
    if (zoomed) {
      zoomed.hidden = view === null;
      if (view) zoomed.querySelector("code").textContent = `flopmeter report ${data.place} --window ${Math.floor(low)}:${Math.ceil(high) + 1}`;
    }
  };

  // Pauses, measured steps and falls of MFU stand under the first panel.
  const marks = (svg, x, y, low, high) => {
    const all = [
      ...(data.measured || []).map((step) => [step, "s2", "measured step"]),
      ...(data.pauses || []).map(([step, name, s]) => [step, "s4", `pause: ${name}, ${inUnit(s, "s")}`]),
      ...(data.drops || []).map(([step, before, after]) => [step, "s3", `MFU fell from ${inUnit(before, "1")} to ${inUnit(after, "1")}`]),
    ];
    for (const [step, style, text] of all) {
      if (step < low || step > high) continue;
      const mark = element("path", { d: `M${x(step).toFixed(1)} ${y + 2}l4 8h-8z`, class: `mark ${style}` }, svg);
      element("title", {}, mark, `${text} at step ${figure(step)}`);
    }
  };

  const nearest = (axis, step) => {
    let found = 0, distance = Infinity;
    for (let place = 0; place < axis.length; place++) {
      const apart = Math.abs(axis[place] - step);
      if (apart <= distance) { distance = apart; found = place; } // of a step that a restart repeats, the last
    }
    return found;
  };

  const point = (step) => {
    cursor = step;
    if (!plan) return;
    const line = plan.svg.querySelector(".cursor"), told = byId("readout");
    const isShown = step !== null && step >= plan.low && step <= plan.high;
    line.setAttribute("visibility", isShown ? "visible" : "hidden");
    if (!isShown) return void told?.replaceChildren();
    const axis = data.axes[data.lines[0].step], at = axis[nearest(axis, step)];
    line.setAttribute("x1", plan.x(at));
    line.setAttribute("x2", plan.x(at));
    const parts = [["Step", figure(at)], ...data.lines.map((each) => {
      const place = nearest(data.axes[each.step], at);
      const span = each.low.length ? ` (${inUnit(each.low[place], each.unit)} to ${inUnit(each.high[place], each.unit)})` : "";
      return [each.name, inUnit(each.mean[place], each.unit) + span];
    })];
    for (const [first, name, s] of data.pauses || []) if (first === at) parts.push(["Pause", `${name}, ${inUnit(s, "s")}`]);
    told?.replaceChildren(...parts.map(([name, text]) => {
      const made = document.createElement("span"), strong = document.createElement("b");
      strong.textContent = text;
      made.append(`${name} `, strong);
      return made;
    }));
  };

  const look = (low, high) => {
    const [first, last] = extent();
    // Zoom ends where so few points are left that a line tells nothing: the command for the window goes on from there.
    const axis = data.axes[data.lines[0].step];
    const gap = axis.length > 1 ? (last - first) / (axis.length - 1) : 1, least = FEWEST * Math.max(gap, 1e-9);
    if (high - low < least) [low, high] = [(low + high - least) / 2, (low + high + least) / 2];
    low = Math.max(low, first);
    high = Math.min(high, last);
    view = low <= first && high >= last ? null : [low, high];
    draw();
  };
  const zoom = (factor) => {
    if (factor === 0) { view = null; return draw(); }
    const [low, high] = inView(), middle = cursor !== null && cursor > low && cursor < high ? cursor : (low + high) / 2;
    return look(middle - (middle - low) * factor, middle + (high - middle) * factor);
  };

  const chart = byId("chart");
  if (chart) {
    let pressed = null;
    const at = (event) => (event.clientX - chart.getBoundingClientRect().left) * (plan.width / chart.clientWidth);
    chart.addEventListener("pointermove", (event) => {
      if (!plan) return;
      point(plan.step(at(event)));
      if (pressed === null) return;
      const box = plan.svg.querySelector(".chosen"), here = Math.min(Math.max(at(event), LEFT), plan.width - RIGHT);
      box.setAttribute("x", Math.min(pressed, here));
      box.setAttribute("width", Math.abs(here - pressed));
    });
    chart.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch") return;
      pressed = Math.max(at(event), LEFT);
      chart.setPointerCapture(event.pointerId);
    });
    chart.addEventListener("pointerup", (event) => {
      if (pressed === null) return;
      const [from, to] = [pressed, at(event)].sort((a, b) => a - b);
      pressed = null;
      if (to - from > 6) look(plan.step(from), plan.step(to));
      else plan.svg.querySelector(".chosen").setAttribute("width", 0);
    });
    chart.addEventListener("pointerleave", () => { if (pressed === null) point(null); });
    chart.addEventListener("dblclick", () => zoom(0));
    chart.addEventListener("keydown", (event) => {
      const [low, high] = inView(), axis = data.axes[data.lines[0].step];
      const step = axis[nearest(axis, cursor ?? low)];
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (move) point(Math.min(Math.max(axis[Math.min(Math.max(nearest(axis, step) + move, 0), axis.length - 1)], low), high));
      else if (event.key === "+" || event.key === "=") zoom(0.5);
      else if (event.key === "-") zoom(2);
      else if (event.key === "0" || event.key === "Escape") zoom(0);
      else return;
      event.preventDefault();
    });
    new ResizeObserver(() => { if (plan && Math.max(chart.clientWidth, 240) !== plan.width) draw(); }).observe(chart);
  }

  // ---- the ranks: dark is quick, light is slow ----
  const STOPS = [[0, 34, 78], [66, 78, 108], [124, 123, 120], [184, 170, 100], [254, 232, 56]];
  const shade = (share) => {
    const at = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1), place = Math.min(Math.floor(at), STOPS.length - 2);
    return STOPS[place].map((value, index) => Math.round(value + (STOPS[place + 1][index] - value) * (at - place)));
  };
  const heat = () => {
    const place = byId("heat"), ranks = data && data.ranks;
    if (!place || !ranks) return;
    const num = ranks.own_s[0].length, known = ranks.own_s.flat().filter((value) => value !== null);
    const least = known.reduce((a, b) => Math.min(a, b), Infinity), most = known.reduce((a, b) => Math.max(a, b), 0);
    const top = Math.max(most, 1.3 * least); // a spread of one percent must not look like a disaster
    const canvas = document.createElement("canvas");
    canvas.width = ranks.steps.length;
    canvas.height = num;
    canvas.style.height = `${Math.min(Math.max(8 * num, 90), 420)}px`;
    const context = canvas.getContext("2d", { willReadFrequently: true }), image = context.createImageData(canvas.width, num);
    ranks.own_s.forEach((column, across) => column.forEach((value, rank) => {
      const colour = value === null ? [128, 128, 128, 60] : [...shade((value - least) / (top - least || 1)), 255];
      image.data.set(colour, 4 * (rank * canvas.width + across));
    }));
    context.putImageData(image, 0, 0);
    const legend = document.createElement("p"), bar = document.createElement("span");
    legend.className = "note";
    bar.style.cssText = `display:inline-block;width:8rem;height:.7rem;margin:0 .5rem;background:linear-gradient(to right,${[0, .25, .5, .75, 1].map((share) => `rgb(${shade(share)})`)})`;
    legend.append(`Ranks 0 to ${num - 1} from top to bottom, steps ${figure(ranks.steps[0])} to ${figure(ranks.steps[ranks.steps.length - 1])} from left to right. ${inUnit(least, "s")}`, bar, `${inUnit(top, "s")}`);
    place.replaceChildren(canvas, legend);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const across = Math.min(Math.floor(((event.clientX - box.left) / box.width) * canvas.width), canvas.width - 1);
      const rank = Math.min(Math.floor(((event.clientY - box.top) / box.height) * num), num - 1);
      byId("heat-readout").textContent = `Rank ${rank}, up to step ${figure(ranks.steps[across])}: own work ${inUnit(ranks.own_s[across]?.[rank], "s")}`;
    });
  };

  // ---- buttons ----
  const copy = async (button) => {
    const text = button.parentElement.querySelector("code").textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = document.createElement("textarea"); // a page from a file may have no clipboard
      field.value = text;
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
      button.focus();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.zoom !== undefined) zoom(Number(button.dataset.zoom));
    else if (button.dataset.copy !== undefined) copy(button);
    else if (button.dataset.part) {
      for (const other of document.querySelectorAll("[data-part]")) {
        const isOpen = other === button && other.getAttribute("aria-expanded") !== "true";
        other.setAttribute("aria-expanded", isOpen);
        byId(`part-${other.dataset.part}`).hidden = !isOpen;
      }
    } else if (button.dataset.sort !== undefined) {
      const isSame = order && order.column === button.dataset.sort;
      order = { column: button.dataset.sort, isDown: isSame ? !order.isDown : button.dataset.sort !== "0" };
      arrange(document);
    }
  });

  const theme = byId("theme");
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { byId("theme").textContent = isDark() ? "Light theme" : "Dark theme"; };
  document.addEventListener("click", (event) => {
    if (event.target.id !== "theme") return;
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);

  // ---- the list of runs: sorted, filtered, some chosen ----
  let order = null;
  const arrange = (page) => {
    const table = page.querySelector("table.runs");
    if (!table) return;
    const wanted = (byId("filter")?.value || "").toLowerCase(), rows = [...table.tBodies[0].rows];
    const value = (row) => row.cells[Number(order.column) + 1].dataset.value ?? "";
    if (order) {
      const compared = (a, b) => (a === "" || b === "" ? (a === "") - (b === "") : (order.isDown ? -1 : 1) *
        (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b));
      const sorted = [...rows].sort((a, b) => compared(value(a), value(b)));
      if (sorted.some((row, place) => row !== rows[place])) table.tBodies[0].append(...sorted);
    }
    for (const head of table.tHead.querySelectorAll("[data-sort]")) {
      const isHere = order && head.dataset.sort === order.column;
      head.parentElement.setAttribute("aria-sort", isHere ? (order.isDown ? "descending" : "ascending") : "none");
    }
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  };
  const choose = () => {
    const button = byId("compare");
    if (button) button.disabled = document.querySelectorAll("input[name=run]:checked").length < 2;
  };
  document.addEventListener("input", (event) => { if (event.target.id === "filter") arrange(document); });
  document.addEventListener("change", choose);
  addEventListener("pageshow", choose);

  // ---- live: what is new is put in place, element by element, so that focus, choices and open parts stay ----
  const key = (node) => (node.nodeType === 1 ? node.id || node.dataset.key || "" : "");
  const same = (old, now) => old.nodeType === now.nodeType && old.nodeName === now.nodeName && key(old) === key(now);
  const patch = (old, now) => {
    if (old.nodeType !== 1) {
      if (old.nodeValue !== now.nodeValue) old.nodeValue = now.nodeValue;
      return;
    }
    const kept = new Set(["open", "aria-expanded", "aria-sort", ...("keep" in old.dataset ? ["hidden"] : [])]);
    for (const { name, value } of now.attributes) if (!kept.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const { name } of [...old.attributes]) if (!kept.has(name) && !now.hasAttribute(name)) old.removeAttribute(name);
    if ("own" in old.dataset || old.id === "theme" || old.id === "compare") return;
    const keyed = new Map([...old.childNodes].filter(key).map((child) => [key(child), child]));
    let place = old.firstChild;
    for (const fresh of [...now.childNodes]) {
      const known = key(fresh) ? keyed.get(key(fresh)) : place && !key(place) && same(place, fresh) ? place : null;
      if (known && same(known, fresh)) {
        if (known === place) place = place.nextSibling;
        else old.insertBefore(known, place);
        patch(known, fresh);
      } else old.insertBefore(document.adoptNode(fresh), place);
    }
    while (place) {
      const next = place.nextSibling;
      place.remove();
      place = next;
    }
  };
  const update = (html, fresh) => {
    const page = new DOMParser().parseFromString(html, "text/html"), focused = document.activeElement;
    arrange(page);
    data = fresh;
    patch(byId("page"), Object.assign(page.createElement("div"), { id: "page", className: "wrap", innerHTML: page.body.innerHTML }));
    if (document.activeElement !== focused && focused.isConnected) focused.focus({ preventScroll: true });
    arrange(document);
    draw();
    heat();
    choose();
  };

  const { feed } = document.body.dataset, pulse = byId("pulse");
  let { revision } = document.body.dataset, failures = 0;
  const say = (state, text) => {
    pulse.dataset.state = state;
    if (pulse.textContent !== text) pulse.textContent = text;
  };
  const ask = async () => {
    let waitS = 5;
    try {
      const answer = await fetch(`${feed}?revision=${encodeURIComponent(revision)}`);
      if (answer.status === 200) {
        const news = await answer.json();
        if (news.body !== undefined) {
          update(news.body, news.data);
          revision = document.body.dataset.revision = news.revision;
        }
        say(news.state, news.text);
        waitS = news.again_s;
      } else {
        say("lost", answer.status === 401 ? "Token needed" : answer.status === 404 ? "The run is gone" : "The server cannot read it");
        waitS = 15;
      }
      failures = 0;
    } catch {
      failures += 1;
      say("lost", "No connection; trying again");
      waitS = Math.min(2 ** failures, 30);
    }
    setTimeout(ask, 1000 * (document.hidden ? Math.max(waitS, 15) : waitS));
  };

  if (theme) label();
  choose();
  draw();
  heat();
  root.dataset.drawn = "yes";
  window.flopmeterPage = { update, inView, redraw: draw };
  if (feed) setTimeout(ask, 1000);
})();
