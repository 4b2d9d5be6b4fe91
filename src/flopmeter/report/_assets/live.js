"use strict";
// Asks the server for what is new and puts it in place: less often while nobody looks or the server is gone.
(() => {
  const body = document.body;
  const pulse = document.getElementById("pulse");
  const { feed, feedKind: kind } = body.dataset;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  let revision = body.dataset.revision;
  let marks = {};
  let failures = 0;

  const say = (state, text) => {
    pulse.dataset.state = state;
    if (pulse.textContent !== text) pulse.textContent = text;
  };

  const chosen = () => new Set([...document.querySelectorAll("input[name=run]:checked")].map((box) => box.value));

  const putInPlace = (news) => {
    const kept = chosen();
    for (const [name, figure] of Object.entries(news.figures)) figures[name] = figure;
    for (const name of Object.keys(figures)) if (!(name in news.marks)) delete figures[name];
    marks = news.marks;
    window.flopmeterPage.update(news.body, figures);
    for (const box of document.querySelectorAll("input[name=run]")) box.checked = kept.has(box.value);
  };

  const ask = async () => {
    let waitS = 5;
    try {
      const known = Object.entries(marks).map(([name, mark]) => `${name}:${mark}`).join(",");
      const answer = await fetch(`${feed}?revision=${encodeURIComponent(revision)}&known=${encodeURIComponent(known)}`);
      if (answer.status === 200) {
        const news = await answer.json();
        if (news.revision !== revision) {
          revision = news.revision;
          putInPlace(news);
          body.dataset.revision = revision;
        }
        say(news.state, news.state_text);
        waitS = news.again_s;
      } else {
        say("lost", answer.status === 401 ? "Token needed" : answer.status === 404 ? "The run is gone" : "The server cannot read it");
        waitS = 15;
      }
      failures = 0;
    } catch (error) {
      failures += 1;
      say("lost", "No connection; trying again");
      waitS = Math.min(2 ** failures, 30);
    }
    setTimeout(ask, 1000 * (document.hidden ? Math.max(waitS, 15) : waitS));
  };

  const button = document.getElementById("compare");
  if (button) {
    const count = () => { button.disabled = chosen().size < 2; };
    document.addEventListener("change", count);
    addEventListener("pageshow", count);
    count();
  }
  if (feed) setTimeout(ask, 1000);
})();
