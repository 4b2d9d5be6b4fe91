"use strict";
// Draws the figures of the page in the colours of its theme, and again when the theme, the medium or the data change.
window.flopmeterPage = (() => {
  const root = document.documentElement;
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  let figures = JSON.parse(document.getElementById("figures").textContent);

  const colour = (token) => {
    probe.style.color = `var(--${token})`;
    return getComputedStyle(probe).color;
  };

  // Colours are tokens such as "@blue", and only under a key that names colours: a label may begin with "@" as well.
  const painted = (value, key = "") => {
    if (Array.isArray(value)) return value.map((item) => painted(item, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, painted(item, name)]));
    }
    return typeof value === "string" && value[0] === "@" && /colors?$/.test(key) ? colour(value.slice(1)) : value;
  };

  const styled = (axis, size) => ({
    gridcolor: colour("grid"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true, ...axis,
    title: { ...axis.title, font: { size } },
  });

  const layoutOf = (figure) => {
    const layout = painted(figure.layout);
    const axes = Object.keys(layout).filter((key) => /^[xy]axis/.test(key));
    const size = root.clientWidth < 640 ? 11 : 13;
    const own = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size, color: colour("ink") },
      hoverlabel: { bgcolor: colour("sheet"), bordercolor: colour("line"), font: { color: colour("ink") } },
      margin: { l: 8, r: 16, t: 16, b: 44, ...layout.margin },
      uirevision: "kept",
    };
    for (const axis of axes) layout[axis] = styled(layout[axis], size);
    return { ...layout, ...own };
  };

  const draw = () => {
    for (const place of document.querySelectorAll("[data-figure]")) {
      const figure = figures[place.dataset.figure];
      place.closest("figure").hidden = !figure;
      if (!figure) continue;
      const options = { responsive: true, displayModeBar: false };
      place.style.height = `${figure.layout.height}px`;
      Plotly.react(place, painted(figure.data), layoutOf(figure), options);
    }
  };

  const zoom = (place, factor) => {
    if (factor === 0) return Plotly.relayout(place, { "xaxis.autorange": true });
    const [low, high] = place.layout.xaxis.range.map(Number);
    const half = (high - low) * factor / 2;
    const middle = (low + high) / 2;
    return Plotly.relayout(place, { "xaxis.range": [middle - half, middle + half] });
  };

  const swap = (fresh) => {
    for (const old of document.querySelectorAll("[data-live]")) {
      const now = fresh.querySelector(`[data-live="${old.dataset.live}"]`);
      if (!now) continue;
      old.hidden = now.hidden;
      if (old.tagName !== "SECTION" && old.innerHTML !== now.innerHTML) old.replaceChildren(...now.childNodes);
    }
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-zoom]");
    if (button) zoom(document.querySelector(`[data-figure="${button.dataset.on}"]`), Number(button.dataset.zoom));
  });

  const theme = document.getElementById("theme");
  const isDark = () => getComputedStyle(probe).colorScheme === "dark" ||
    (root.dataset.theme === undefined && matchMedia("(prefers-color-scheme: dark)").matches);
  const label = () => { theme.textContent = isDark() ? "Light theme" : "Dark theme"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
    draw();
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => { label(); draw(); });
  }

  label();
  draw();
  root.dataset.drawn = "yes";

  return {
    // A live page hands over what a fresh render of the same template holds, and newly made figures.
    update(bodyHtml, freshFigures) {
      swap(new DOMParser().parseFromString(bodyHtml, "text/html"));
      figures = freshFigures;
      draw();
    },
  };
})();
