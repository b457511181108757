"use strict";
// Order of initialisation: charts get their numbers first and are drawn once.
(async () => {
  await loadBokeh();
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  await fillCurves();
  followCurves();
  await followSites();
  // Fill first, then draw once.
  await Bokeh.embed.add_document_standalone(drawn, document.body, drawn.roots().map((chart) => at(`chart-${chart.name}`)));
  for (const chart of document.querySelectorAll(".chart")) unreachable(chart);
  drawn.on_event("mousemove", (_, event) => tip(event.origin?.name === "map" ? pointedCell(event) : pointedCurve(event)));
  drawn.on_event("mouseleave", () => tip([]));
  document.documentElement.dataset.ready = "yes";
})().catch((error) => {
  const place = document.getElementById("trouble");
  place.hidden = false;
  place.textContent = `The charts cannot be drawn in this browser (${error.message}); the tables are complete.`;
  throw error;
});
