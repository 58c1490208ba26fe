// A request that works as it is shown, for a model that is loaded.

class Example {
  constructor() {
    this.command = "";
    byId("copy").addEventListener("click", () => this.copy());
  }

  draw(frame) {
    const model = frame.models.find((one) => one.state === "loaded" && one.config.inputs.includes("text"));
    const command = model ? curl(model, frame.server.keys_required) : "";
    if (command === this.command) return;
    this.command = command;
    for (const id of ["example", "first-example"]) setText(byId(id), command || "Waiting for a model.");
  }

  async copy() {
    const button = byId("copy");
    try {
      await navigator.clipboard.writeText(this.command);
      setText(button, "Copied");
    } catch {
      // Without TLS a page may not write to the clipboard, but it may select.
      getSelection().selectAllChildren(byId("example"));
      setText(button, "Selected");
    }
    setTimeout(() => setText(button, "Copy"), 1500);
  }
}

function curl(model, keyed) {
  const outputs = model.config.outputs;
  if (outputs.includes("chat")) {
    const messages = [{ role: "user", content: "What is a penstock?" }];
    return request("/v1/chat/completions", { model: model.name, messages, max_tokens: 64, stream: true }, keyed);
  }
  let [operation, body] = ["encode", { items: [{ text: "A river runs through it." }] }];
  if (outputs.includes("json")) {
    [operation, body] = ["extract", { items: [{ text: "Ada Lovelace lived in London." }], labels: ["person", "city"] }];
  } else if (outputs.length === 1 && outputs[0] === "score") {
    [operation, body] = ["score", { query: { text: "What is a penstock?" }, items: [{ text: "A gate for water." }, { text: "A bird." }] }];
  }
  return request(`/v1/${operation}/${inPath(model.name)}`, body, keyed);
}

function request(path, body, keyed) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [
    `curl ${quoted(`${location.origin}${path}`)}`,
    "-H 'Content-Type: application/json'",
    "-H 'Accept: application/json'",
    ...(keyed ? ["-H \"Authorization: Bearer $PENSTOCK_KEY\""] : []),
    `-d ${quoted(JSON.stringify(body))}`,
  ];
  return lines.join(" \\\n  ");
}
