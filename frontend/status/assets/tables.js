// Parts of tables that on a narrow screen become cards: each cell knows the name of its column.

// Heads of `columns`, which are [key, label, class, explanation]; with `sort` a click on a head calls it with the key.
function heads(row, columns, sort) {
  return columns.map(([key, label, className, words]) => {
    const head = make("th", className);
    head.scope = "col";
    if (sort) {
      const button = make("button", "sorter", label);
      button.type = "button";
      explain(button, words);
      button.addEventListener("click", () => sort(key));
      head.append(button);
    } else {
      head.append(term(label, words));
    }
    row.append(head);
    return [key, head];
  });
}

// A row with a cell for each column by its key.
function rowOf(columns) {
  const view = { root: make("tr"), cells: {} };
  for (const [key, label, className] of columns) {
    const cell = make("td", key === "name" ? "model-name" : key === "state" ? "state" : className);
    cell.dataset.label = key === "name" || key === "state" ? "" : label;
    view.cells[key] = cell;
    view.root.append(cell);
  }
  return view;
}

function put(view, key, text, zero) {
  setText(view.cells[key], text);
  view.cells[key].classList.toggle("zero", Boolean(zero));
}

// A bar with a text in a cell; returns what draws it.
function withTrack(cell, label) {
  const root = make("div", "fill");
  const bar = track(label);
  const text = make("span");
  root.append(bar, text);
  cell.append(root);
  return (share, shown, zero) => {
    bar.hidden = !known(share);
    fillTrack(bar, share);
    setText(text, shown);
    cell.classList.toggle("zero", Boolean(zero));
  };
}
