"use strict";

/* Shows /openapi.json. All text of the document goes through textContent. */

const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const prose = (text) => element("span", {}, ...text.split("`").map((part, at) => at % 2 ? element("code", {}, part) : part));
const table = (heads, rows) => element("table", {},
  element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
  element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))))));

const show = (api) => {
  const resolve = (node) => node && node.$ref
    ? node.$ref.slice(2).split("/").reduce((found, key) => found[key], api) : node;
  const nameOf = (node) => node.$ref ? node.$ref.split("/").pop() : "";

  const typeOf = (schema) => {
    if (schema.$ref) return nameOf(schema);
    if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
    if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
    if (schema.const !== undefined) return JSON.stringify(schema.const);
    if (schema.type === "array") return `array of ${schema.items && Object.keys(schema.items).length ? typeOf(schema.items) : "any"}`;
    if (schema.contentEncoding) return `${schema.type} (${schema.contentEncoding})`;
    const inner = schema.additionalProperties;
    if (schema.type === "object" && inner && typeof inner === "object" && Object.keys(inner).length) return `map to ${typeOf(inner)}`;
    return schema.type || "any";
  };
  const rangeOf = (schema) => [
    ["minimum", "at least"], ["exclusiveMinimum", "above"], ["maximum", "at most"], ["exclusiveMaximum", "below"],
    ["minItems", "items at least"], ["maxItems", "items at most"], ["minLength", "length at least"], ["pattern", "pattern"],
  ].filter(([key]) => schema[key] !== undefined).map(([key, text]) => `${text} ${schema[key]}`).join(", ");
  const refsIn = (schema) => {
    if (!schema || typeof schema !== "object") return [];
    if (schema.$ref) return [schema];
    return [schema.items, schema.additionalProperties, ...(schema.anyOf || [])].flatMap(refsIn);
  };

  const structOf = (node, seen = []) => {
    const schema = resolve(node), name = nameOf(node);
    if (!schema || !schema.properties) return element("p", { class: "soft" }, typeOf(node));
    const required = new Set(schema.required || []);
    const fields = Object.entries(schema.properties);
    const below = new Map(fields.flatMap(([, field]) => refsIn(field)).map((ref) => [nameOf(ref), ref]));
    const rows = fields.map(([key, field]) => [
      element("code", {}, key),
      [typeOf(field), rangeOf(field)].filter(Boolean).join("; "),
      required.has(key) ? "required" : "",
    ]);
    return element("div", {},
      schema.description ? element("p", { class: "soft" }, prose(schema.description)) : "",
      table(["Field", "Type", ""], rows),
      ...[...below].filter(([inner]) => !seen.includes(inner) && inner !== name).map(([inner, ref]) =>
        element("details", {}, element("summary", {}, inner), structOf(ref, [...seen, name, inner]))));
  };

  const curlOf = (path, method, operation) => {
    const model = "MODEL";
    const url = `${location.origin}${path.replace("{model}", model)}`;
    const content = operation.requestBody && operation.requestBody.content["application/json"];
    if (!content || !content.example) return `curl ${method === "get" ? "" : "-X POST "}${url}`;
    return [`curl ${url} \\`, "  -H 'Content-Type: application/json' -H 'Accept: application/json' \\",
      `  -d '${JSON.stringify(content.example)}'`].join("\n");
  };

  const shown = (path, method, operation) => {
    const parts = [element("h2", {},
      element("span", { class: `method ${method}` }, `${method.toUpperCase()} `), element("code", {}, path)),
      element("p", {}, prose(operation.summary)), element("pre", {}, curlOf(path, method, operation))];
    const parameters = (operation.parameters || []).map(resolve);
    if (parameters.length) {
      parts.push(element("h3", {}, "Parameters"), table(["Name", "In", "Type", ""], parameters.map((one) => [
        element("code", {}, one.name), one.in, [typeOf(one.schema), rangeOf(one.schema)].filter(Boolean).join("; "),
        prose(one.description || "")])));
    }
    if (operation.requestBody) {
      const media = Object.keys(operation.requestBody.content);
      parts.push(element("h3", {}, `Request body: ${media.join(" or ")}`),
        structOf(operation.requestBody.content[media[0]].schema));
    }
    parts.push(element("h3", {}, "Answers"));
    for (const [status, answer] of Object.entries(operation.responses)) {
      const media = Object.keys(answer.content || {});
      const body = element("details", {}, element("summary", {}, `${status} `,
        element("span", { class: "soft" }, `${answer.description} ${media.join(" or ")}`)));
      if (media.length) body.append(structOf(answer.content[media[0]].schema));
      const headers = Object.entries(answer.headers || {}).map(([name, header]) =>
        [element("code", {}, name), prose(resolve(header).description || "")]);
      if (headers.length) body.append(element("h3", {}, "Headers"), table(["Name", ""], headers));
      parts.push(body);
    }
    return element("section", { id: operation.operationId }, ...parts);
  };

  const all = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
  const contents = document.getElementById("contents"), body = document.getElementById("document");
  contents.replaceChildren(element("strong", {}, `${api.info.title} ${api.info.version}`));
  body.replaceChildren(element("h1", {}, api.info.title), element("p", {}, prose(api.info.description)),
    element("p", {}, "Errors are always JSON. Types are strict, null equals absent, unknown fields are ignored. ",
      element("a", { href: "/openapi.json" }, "OpenAPI document")));
  for (const { name } of api.tags) {
    const mine = all.filter(({ operation }) => operation.tags.includes(name));
    contents.append(element("h2", {}, name), ...mine.map(({ path, method, operation }) =>
      element("a", { href: `#${operation.operationId}` },
        element("span", { class: `method ${method}` }, method.toUpperCase()), path)));
    body.append(...mine.map(({ path, method, operation }) => shown(path, method, operation)));
  }
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
};

fetch("/openapi.json").then((answer) => {
  if (!answer.ok) throw new Error(`/openapi.json answered ${answer.status}`);
  return answer.json();
}).then(show).catch((error) => {
  document.getElementById("document").replaceChildren(element("p", {}, `The schema could not be shown: ${error.message}`));
});
