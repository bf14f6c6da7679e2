// Small pieces of DOM. Text is set as textContent, never as HTML.

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A row of buttons of which one is pressed.
export function choice(label, names, pressed, onPick) {
  const group = element("div", { class: "choice", role: "group", "aria-label": label });
  group.append(element("span", { class: "muted" }, label));
  const buttons = new Map();
  for (const name of names) {
    const button = element("button", { type: "button", "data-name": name, onclick: () => onPick(name) }, name);
    buttons.set(name, button);
    group.append(button);
  }
  const press = (name) => {
    for (const [each, button] of buttons) button.setAttribute("aria-pressed", String(each === name));
  };
  press(pressed);
  return { group, press, buttons };
}

const SETTLE_MS = 2000;

// A choice that Python gives and a person changes. Python's is taken where it is new, but not just after a
// person chose: what arrives then is the echo of that or of the choice before.
export function followed(map, name, choices, apply) {
  let given, pickedAt = -Infinity;
  return {
    pick(value) {
      pickedAt = performance.now();
      apply(value);
      map.looked = { ...map.looked, [name]: value }; // all of them: a second choice overtakes the first
      map.setTriggerValue?.("looked", map.looked);
    },
    take(value) {
      if (value === given || !choices.includes(value)) return;
      given = value;
      if (performance.now() - pickedAt > SETTLE_MS) apply(value);
    },
  };
}

const darkness = new Map(); // by colour as it is written

// Whether the page's ground is dark, whatever the theme is called.
export function isDark(node) {
  const host = node.host ?? node;
  const colour = getComputedStyle(host).getPropertyValue("--st-background-color").trim() || "#ffffff";
  if (!darkness.has(colour)) {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = colour; // reads every way to write a colour, and tells it as #rrggbb
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(probe.fillStyle.slice(at, at + 2), 16));
    darkness.set(colour, r * 0.3 + g * 0.59 + b * 0.11 < 128);
  }
  return darkness.get(colour);
}

// Fits a canvas to its box; true when its size changed. Device pixels.
export function fitCanvas(canvas, box = canvas) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const width = Math.max(1, Math.round(box.clientWidth * ratio));
  const height = Math.max(1, Math.round(box.clientHeight * ratio));
  if (canvas.width === width && canvas.height === height) return false;
  canvas.width = width;
  canvas.height = height;
  return true;
}

export function ratioOf() {
  return Math.min(window.devicePixelRatio || 1, 2);
}

export const number = (value) => Math.round(value).toLocaleString("en-US");

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

// The stylesheet of all components, once per root; a promise of its being there.
export function loadStyles(root, modules) {
  if (root.querySelector("link[data-kvatlas]")) return;
  root.append(element("link", { rel: "stylesheet", href: `${modules}kvatlas.css`, "data-kvatlas": true }));
}

// What Python says, with the addresses of our routes as the browser reaches them.
export function located(data) {
  const query = data.worker ? `?worker=${encodeURIComponent(data.worker)}` : "";
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  return {
    ...data,
    modules: `${location.origin}${data.base}/${data.digest}/`,
    socket: `${scheme}//${location.host}${data.base}/pages${query}`,
    spectrogram: `${location.origin}${data.base}/spectrogram${query}`,
  };
}
