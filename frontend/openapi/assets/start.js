"use strict";

// How many operations fit the phrase, also of sections that are folded.
let fitting = 0;

// Operations whose section, method, path or summary have all words of a phrase; sections without any are left out.
function opsFilter(sections, phrase) {
  const words = phrase.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (operation, tag) => {
    const text = [tag, operation.get("method"), operation.get("path"), operation.getIn(["operation", "summary"])].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const found = sections
    .map((section, tag) => section.update("operations", (operations) => operations.filter((operation) => fits(operation, tag))))
    .filter((section) => section.get("operations").size);
  fitting = found.reduce((sum, section) => sum + section.get("operations").size, 0);
  return found;
}

const ui = SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  filter: true, // Ours stands in the head of the page, and the style hides Swagger UI's, which knows sections only.
  plugins: [() => ({ fn: { opsFilter } })],
  tryItOutEnabled: true,
  validatorUrl: null,
});

const box = document.getElementById("filter");

function tellFound() {
  document.getElementById("found").textContent = box.value.trim() ? (fitting ? `${fitting} found` : "nothing fits") : "";
}

box.addEventListener("input", () => {
  ui.getSystem().layoutActions.updateFilter(box.value.trim() || true);
  requestAnimationFrame(() => requestAnimationFrame(tellFound));
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input, textarea, select")) return;
  event.preventDefault();
  box.focus();
});
