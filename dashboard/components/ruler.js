// A prompt cut into tokens, with the edges of its pages; each token says whether the cache had it.

import { element, isDark, loadStyles, located } from "./dom.js";

const MAX_TOKENS = 4000;
const WORDS = { hit: "hit", miss_cold: "cold", miss_evicted: "evicted", unaligned: "unaligned" };

export function mount(component) {
  const root = component.parentElement, data = located(component.data);
  loadStyles(root, data.modules);
  root.kvatlas ??= element("div", { class: "kvatlas" });
  if (!root.kvatlas.isConnected) root.append(root.kvatlas);
  const kind = isDark(root) ? "dark" : "light";
  const key = JSON.stringify([data.pieces, data.results, data.page_size, kind]);
  if (root.kvatlasKey !== key) {
    root.kvatlasKey = key;
    paint(root.kvatlas, data, kind);
  }
  return () => {
    root.kvatlas?.remove();
    root.kvatlas = null;
    root.kvatlasKey = null;
  };
}

// Result of each token. What was evicted continues what was hit, and what is cold continues that.
export function resultsOf(count, results) {
  if (!results) return Array(count).fill(null);
  const names = ["hit", "miss_evicted", "miss_cold", "unaligned"];
  return names.flatMap((name) => Array(results[name]).fill(name)).slice(0, count);
}

function paint(node, data, kind) {
  const results = resultsOf(data.pieces.length, data.results), { palette } = data;
  const ruler = element("div", { class: "ruler" });
  data.pieces.slice(0, MAX_TOKENS).forEach((piece, at) => {
    if (at % data.page_size === 0) ruler.append(element("span", { class: "edge", title: `page ${at / data.page_size} of the prompt` }, String(at / data.page_size)));
    const result = results[at];
    const colour = result ? palette.results[result][kind] : palette.ground.muted[kind];
    const token = element("span", { class: `token ${result ?? ""}`, style: `border-color: ${colour}`, title: result ? WORDS[result] : "" });
    token.textContent = piece.replaceAll("\n", "↵");
    ruler.append(token);
  });
  const legend = element("div", { class: "legend" });
  for (const [name, word] of Object.entries(data.results ? WORDS : {})) {
    legend.append(element("span", {}, element("i", { class: "swatch", style: `background: ${palette.results[name][kind]}` }), `${data.results[name]} ${word}`));
  }
  node.dataset.tokens = data.pieces.length;
  node.replaceChildren(legend, ruler);
}
