"use strict";

// Operations whose section, method, path or summary have all words of a phrase; sections without any are left out.
function opsFilter(sections, phrase) {
  const words = phrase.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (operation, tag) => {
    const text = [tag, operation.get("method"), operation.get("path"), operation.getIn(["operation", "summary"])].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  return sections
    .map((section, tag) => section.update("operations", (operations) => operations.filter((operation) => fits(operation, tag))))
    .filter((section) => section.get("operations").size);
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
  const count = document.querySelectorAll(".opblock").length;
  document.getElementById("found").textContent = box.value.trim() ? (count ? `${count} found` : "nothing fits") : "";
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
