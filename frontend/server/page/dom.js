// Creation of elements. Text is inserted as text, never as HTML.

export const $ = (id) => document.getElementById(id);

/** An element: make("a", { href }, "text", child). Functions become listeners: { onclick: f }. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** An SVG element with these attributes. */
export function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** One of the icons of index.html. */
export const icon = (name) => draw("svg", { "aria-hidden": "true" }, draw("use", { href: `#icon-${name}` }));

/** A button that copies the result of `text()`, and confirms it for a moment. */
export function copyButton(text, label = "Copy") {
  const button = make("button", { type: "button", className: "quiet", title: label, ariaLabel: label }, icon("copy"));
  button.onclick = async () => {
    await copy(text());
    button.replaceChildren(icon("done"));
    say("Copied");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  };
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { value: text, className: "unseen" }); // plain http has no clipboard
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Announce a text to screen readers. */
export function say(text) {
  $("status").textContent = text;
}
