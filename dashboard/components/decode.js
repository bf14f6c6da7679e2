// Binary frames of the page feed → typed arrays. Pure: no DOM, no sockets; tests run it under Node.
// The layout is that of dashboard/frames.py, columns in falling width, so that each is a view, not a copy.

export const VERSION = 1;
export const SNAPSHOT = 1, DELTA = 2, LISTS = 3;
const DEFLATED = 1, WIDE_FILL = 2, PAST = 4, ALL_LISTS = 8;
const HEADER_BYTES = 24;

export class BadFrame extends Error {}

// {kind, version, flags, count, revision, clock} of a frame. Revisions stay below 2^53.
export function readHeader(buffer) {
  if (buffer.byteLength < HEADER_BYTES) throw new BadFrame(`a frame of ${buffer.byteLength} bytes`);
  const view = new DataView(buffer);
  const header = {
    kind: view.getUint8(0),
    version: view.getUint8(1),
    flags: view.getUint16(2, true),
    count: view.getUint32(4, true),
    revision: view.getUint32(8, true) + view.getUint32(12, true) * 4294967296,
    clock: view.getFloat64(16, true),
  };
  header.isPast = Boolean(header.flags & PAST);
  header.isAll = Boolean(header.flags & ALL_LISTS);
  header.isWide = Boolean(header.flags & WIDE_FILL);
  if (header.version !== VERSION) throw new BadFrame(`frame version ${header.version}`);
  return header;
}

// A promise of one frame, read: {header, ...columns}.
export async function decode(buffer) {
  const header = readHeader(buffer);
  if (header.kind === DELTA) return readDelta(buffer, header);
  if (header.kind === LISTS) return readLists(buffer, header);
  if (header.kind === SNAPSHOT) return readSnapshot(buffer, header);
  throw new BadFrame(`frame kind ${header.kind}`);
}

export function readDelta(buffer, header) {
  const take = taker(buffer, HEADER_BYTES);
  const pages = take(Uint32Array, header.count);
  return { header, pages, ...readTail(take, header) };
}

async function readSnapshot(buffer, header) {
  const view = new DataView(buffer);
  const firstPage = view.getUint32(HEADER_BYTES, true);
  const partsLeft = view.getUint32(HEADER_BYTES + 4, true);
  const packed = new Uint8Array(buffer, HEADER_BYTES + 8);
  const body = header.flags & DEFLATED ? await inflate(packed) : packed.slice().buffer;
  const take = taker(body, 0);
  const idle = take(Uint32Array, header.count);
  return { header, firstPage, partsLeft, idle, ...readTail(take, header) };
}

export function readLists(buffer, header) {
  const take = taker(buffer, HEADER_BYTES);
  const starts = take(Uint32Array, header.count + 1);
  const pages = take(Uint32Array, starts[header.count]);
  return { header, starts, pages, owners: take(Uint16Array, header.count) };
}

function readTail(take, header) {
  const owners = take(Uint16Array, header.count);
  const wideFill = header.isWide ? take(Uint16Array, header.count) : null;
  const states = take(Uint8Array, header.count);
  const refs = take(Uint8Array, header.count);
  return { owners, states, refs, fill: wideFill || take(Uint8Array, header.count) };
}

function taker(buffer, start) {
  let place = start;
  return (Kind, count) => {
    const bytes = count * Kind.BYTES_PER_ELEMENT;
    if (place + bytes > buffer.byteLength) throw new BadFrame("a frame that is too short");
    const array = new Kind(buffer, place, count);
    place += bytes;
    return array;
  };
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
