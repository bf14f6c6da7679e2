// A page's colour: by state, owner, fill, references or age. Pure: palette and planes in, u32 pixels out.

import { FREE, RESERVED, STATE_NAMES } from "./planes.js";

export const MODES = ["state", "owner", "fill", "refs", "age"];
const GOLDEN_ANGLE = 137.508;

// Cividis (Nunez, Anderton, Renslow 2018) in 18 steps; its first quarter is the ground of free pages.
const CIVIDIS = [
  [0, 32, 76], [0, 42, 102], [0, 52, 110], [39, 63, 108], [60, 74, 107], [76, 85, 107],
  [91, 95, 109], [104, 106, 112], [117, 117, 117], [131, 129, 120], [146, 140, 120], [161, 152, 118],
  [176, 165, 114], [192, 177, 109], [209, 191, 102], [225, 204, 92], [243, 219, 79], [255, 233, 69],
];

export function rgbOf(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// Pixel as a Uint32Array on little-endian machines sees it.
export function pixel([r, g, b], alpha = 255) {
  return ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

export function mix(one, two, share) {
  return one.map((value, at) => Math.round(value + (two[at] - value) * share));
}

// share 0..1 → colour, from a quarter of cividis up.
export function ramp(share) {
  const at = (0.25 + 0.75 * Math.min(Math.max(share, 0), 1)) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return mix(CIVIDIS[low], CIVIDIS[low + 1], at - low);
}

export function ownerColour(owner, isDark) {
  const hue = (owner * GOLDEN_ANGLE) % 360, light = isDark ? 0.6 : 0.45;
  const reach = 0.65 * Math.min(light, 1 - light);
  return [0, 8, 4].map((offset) => {
    const k = (offset + hue / 30) % 12;
    return Math.round(255 * (light - reach * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}

// Shares of the ramps, so that the legend can say the same.
export const refsShare = (refs) => Math.log2(Math.max(1, refs)) / 6; // 1 .. 64 references
export const ageShare = (ms) => Math.log2(1 + ms / 1000) / 9.25; // now .. 10 minutes

export class Colours {
  constructor(palette, isDark) {
    this.isDark = isDark;
    const kind = isDark ? "dark" : "light";
    this.states = STATE_NAMES.map((name) => rgbOf((palette.states[name] || palette.states.free)[kind]));
    this.ground = rgbOf(palette.ground.background[kind]);
    this.text = palette.ground.text[kind];
    this.muted = palette.ground.muted[kind];
    this.alarm = palette.results.miss_evicted[kind];
    this.statePixels = new Uint32Array(this.states.map((rgb) => pixel(rgb)));
    this.dim = STATE_NAMES.map((_, state) => pixel(mix(this.states[FREE], this.states[state], 0.35)));
    this.ownerPixels = new Uint32Array(65_536);
    this.refPixels = new Uint32Array(256).map((_, refs) => pixel(ramp(refsShare(refs))));
    this.rampPixels = new Uint32Array(256).map((_, at) => pixel(ramp(at / 255)));
  }

  ofOwner(owner) {
    if (!this.ownerPixels[owner]) this.ownerPixels[owner] = pixel(ownerColour(owner, this.isDark));
    return this.ownerPixels[owner];
  }

  // A function page → pixel.
  painter(mode, planes) {
    const { state, owner, fill, refs } = planes;
    const isPlain = (page) => state[page] === FREE || state[page] === RESERVED || state[page] === 0;
    if (mode === "owner") {
      return (page) => (owner[page] ? this.ofOwner(owner[page]) : isPlain(page) ? this.statePixels[state[page]] : this.dim[state[page]]);
    }
    if (mode === "fill") {
      const scale = 255 / planes.pageSize;
      return (page) => (isPlain(page) ? this.statePixels[state[page]] : this.rampPixels[Math.min(255, Math.round(fill[page] * scale))]);
    }
    if (mode === "refs") {
      return (page) => (refs[page] ? this.refPixels[refs[page]] : isPlain(page) ? this.statePixels[state[page]] : this.dim[state[page]]);
    }
    if (mode === "age") {
      return (page) => (isPlain(page) ? this.statePixels[state[page]] : this.rampPixels[Math.min(255, Math.round(255 * ageShare(planes.idleMs(page))))]);
    }
    return (page) => this.statePixels[state[page]];
  }
}

// Black or white, whichever is read better on a colour: [r, g, b] → "#000" or "#fff".
export function inkOn([r, g, b]) {
  const linear = [r, g, b].map((value) => (value <= 10 ? value / 3294 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return linear[0] * 0.2126 + linear[1] * 0.7152 + linear[2] * 0.0722 > 0.179 ? "#000" : "#fff";
}
