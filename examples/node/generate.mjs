// A client in Node without generated code: the protos are read at start.
//
//   npm ci --prefix examples/node    (once)
//   node examples/node/generate.mjs [ADDRESS]
//
// KVATLAS_TOKEN, if set, goes along.
// Shows a stream, a cancel, a deadline of 200 ms, a refused request with its details, the retries of the
// service config, and the planes of the page map. Ends with exit code 1 if anything is not as it should be.

import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import assert from "node:assert/strict";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const here = dirname(fileURLToPath(import.meta.url));
const protos = join(here, "..", "..", "protos");
const address = process.argv[2] ?? "127.0.0.1:50051";

const definition = protoLoader.loadSync(
  ["kvatlas/v1/generation.proto", "kvatlas/v1/cache.proto", "kvatlas/v1/server.proto"],
  { includeDirs: [protos], oneofs: true, longs: String, defaults: true },
);
const { kvatlas } = grpc.loadPackageDefinition(definition);
const options = {
  "grpc.service_config": readFileSync(join(here, "..", "service_config.json"), "utf8"),
  "grpc.keepalive_time_ms": 30000,
  "grpc.keepalive_timeout_ms": 10000,
};
const generation = new kvatlas.v1.GenerationService(address, grpc.credentials.createInsecure(), options);
const cache = new kvatlas.v1.CacheService(address, grpc.credentials.createInsecure());

const deadline = (milliseconds) => ({ deadline: Date.now() + milliseconds });

// With each call; a Metadata of its own, since retries and interceptors may add to it.
function credentials() {
  const metadata = new grpc.Metadata();
  const token = process.env.KVATLAS_TOKEN;
  if (token) metadata.set("authorization", `Bearer ${token}`);
  return metadata;
}

// The order of a stream: started, deltas without a gap, one end per choice, the summary, status OK.
async function stream() {
  const call = generation.StreamGenerate(
    { spec: { text: "The sky is", sampling: { temperature: 0 }, stop: { maxTokens: 12 } } },
    credentials(),
    deadline(60000),
  );
  const kinds = [];
  let text = "";
  let tokens = 0;
  for await (const message of call) {
    kinds.push(message.event);
    if (message.event === "delta") {
      assert.equal(message.delta.tokenOffset, tokens);
      tokens += message.delta.tokenCount;
      text += message.delta.text;
    }
  }
  assert.equal(kinds[0], "started");
  assert.deepEqual(kinds.slice(-2), ["choiceFinished", "summary"]);
  console.log(`stream: ${tokens} tokens:${text.replaceAll("\n", " ")}`);
}

// Leaving the loop is not enough: the call is cancelled by name, and its pages go back to the pool.
async function cancel() {
  const call = generation.StreamGenerate(
    { spec: { text: "Count: 1, 2, 3,", stop: { maxTokens: 1000, ignoreEos: true } } },
    credentials(),
    deadline(60000),
  );
  let deltas = 0;
  const code = await new Promise((resolve, reject) => {
    call.on("data", (message) => {
      if (message.event === "delta" && (deltas += 1) === 5) call.cancel();
    });
    call.on("error", (error) => resolve(error.code));
    call.on("end", () => reject(new Error("the stream ended by itself")));
  });
  assert.equal(code, grpc.status.CANCELLED);
  const limit = Date.now() + 10000;
  let active;
  do {
    active = (await unary(cache, "GetPagePool", {})).stats.activePages;
  } while (active > 0 && Date.now() < limit);
  assert.equal(active, 0);
  console.log(`cancel: after ${deltas} deltas, no page in use`);
}

// A deadline ends the call wherever it is.
async function timeout() {
  const call = generation.StreamGenerate(
    { spec: { text: "Once upon a time", stop: { maxTokens: 4000, ignoreEos: true } } },
    credentials(),
    deadline(200),
  );
  const error = await failure(async () => {
    for await (const message of call) void message;
  });
  assert.equal(error.code, grpc.status.DEADLINE_EXCEEDED);
  console.log("deadline: DEADLINE_EXCEEDED after 200 ms");
}

// Reason and violations are in the trailer, as google.rpc.Status.
async function refused() {
  const error = await failure(() =>
    unary(generation, "Generate", { spec: { text: "x", sampling: { temperature: 9, topP: 7 } } }),
  );
  assert.equal(error.code, grpc.status.INVALID_ARGUMENT);
  const details = decodeDetails(error.metadata.get("grpc-status-details-bin")[0]);
  assert.equal(details.reason, "INVALID_FIELD");
  assert.deepEqual(details.fields.sort(), ["spec.sampling.temperature", "spec.sampling.top_p"]);
  console.log(`refused: ${details.reason} at ${details.fields.join(", ")}`);
}

// Until a server has taken a call, gRPC sends it again by itself, as service_config.json says. Seen at a
// server of our own that is not ready twice, and says when to come back.
async function retry() {
  let attempts = 0;
  const server = new grpc.Server();
  server.addService(kvatlas.v1.GenerationService.service, {
    StreamGenerate(call) {
      attempts += 1;
      if (attempts < 3) {
        const metadata = new grpc.Metadata();
        metadata.set("grpc-retry-pushback-ms", "20");
        call.emit("error", { code: grpc.status.UNAVAILABLE, details: "loading", metadata });
        return;
      }
      call.write({ summary: { usage: { promptTokens: 1 } } });
      call.end();
    },
  });
  const port = await new Promise((resolve, reject) =>
    server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (error, bound) =>
      error ? reject(error) : resolve(bound),
    ),
  );
  const client = new kvatlas.v1.GenerationService(
    `127.0.0.1:${port}`,
    grpc.credentials.createInsecure(),
    options,
  );
  try {
    const events = [];
    for await (const { event } of client.StreamGenerate({ spec: { text: "x" } }, deadline(10000)))
      events.push(event);
    assert.deepEqual(events, ["summary"]);
    assert.equal(attempts, 3);
  } finally {
    client.close();
    server.forceShutdown();
  }
  console.log(`retry: taken at attempt ${attempts}`);
}

// Planes are arrays without a header. Copy the Buffer first: its offset need not be a multiple of 4.
async function pages() {
  const call = cache.WatchPageMap({ planes: ["states", "used_ms"] }, credentials(), deadline(10000));
  const states = [];
  let geometry;
  try {
    for await (const { event, snapshot } of call) {
      assert.equal(event, "snapshot");
      geometry ??= snapshot.geometry;
      if (snapshot.pageCount > 0) {
        // else a part with sequences only
        states.push(...snapshot.pages.states);
        const used = new Uint32Array(new Uint8Array(snapshot.pages.usedMs).buffer);
        assert.equal(used.length, snapshot.pageCount);
      }
      if (snapshot.chunksLeft === 0) break;
    }
  } finally {
    call.cancel();
    call.on("error", () => {}); // CANCELLED, by ourselves
  }
  assert.equal(states.length, geometry.pageCount);
  const reserved = states.filter((state) => state === 5).length;
  assert.equal(reserved, 1);
  console.log(`pages: ${states.length} of ${geometry.pageSize} tokens each`);
}

function unary(client, method, request) {
  return new Promise((resolve, reject) =>
    client[method](request, credentials(), deadline(10000), (error, answer) => (error ? reject(error) : resolve(answer))),
  );
}

async function failure(work) {
  try {
    await work();
  } catch (error) {
    return error;
  }
  throw new Error("the call did not fail");
}

// google.rpc.Status and the two details that are read here, by hand: proto-loader ships none of them.
const rpc = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message BadRequest { repeated FieldViolation field_violations = 1;
    message FieldViolation { string field = 1; string description = 2; } }
`).root;

function decodeDetails(trailer) {
  const found = { reason: "", fields: [] };
  for (const { typeUrl, value } of rpc.lookupType("Status").decode(trailer).details) {
    if (typeUrl.endsWith("google.rpc.ErrorInfo")) found.reason = rpc.lookupType("ErrorInfo").decode(value).reason;
    if (typeUrl.endsWith("google.rpc.BadRequest"))
      found.fields = rpc.lookupType("BadRequest").decode(value).fieldViolations.map((violation) => violation.field);
  }
  return found;
}

for (const step of [stream, cancel, timeout, refused, retry, pages]) await step();
generation.close();
cache.close();
console.log("all as it should be");
