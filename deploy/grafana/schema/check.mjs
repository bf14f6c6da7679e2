// Holds dashboards against Grafana's published types: node check.mjs FILE...
// Each file becomes `const dashboard: DashboardFile = <its JSON>`, so that a key that does not exist is an error too.
import { readFileSync } from 'node:fs';
import { basename, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import ts from 'typescript';

const here = dirname(fileURLToPath(import.meta.url));
const options = {
  strict: true,
  noEmit: true,
  skipLibCheck: true,
  types: [],
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
};

const sources = new Map();
for (const path of process.argv.slice(2)) {
  const name = join(here, `${basename(path, '.json')}.checked.ts`);
  const text = readFileSync(path, 'utf8');
  JSON.parse(text);
  sources.set(name, `import type { DashboardFile } from './shapes';\nexport const dashboard: DashboardFile = ${text};\n`);
}
if (sources.size === 0) {
  console.error('usage: node check.mjs FILE...');
  process.exit(2);
}

const host = ts.createCompilerHost(options);
const { fileExists, getSourceFile } = host;
host.fileExists = (name) => sources.has(name) || fileExists(name);
host.getSourceFile = (name, ...rest) =>
  sources.has(name) ? ts.createSourceFile(name, sources.get(name), rest[0]) : getSourceFile(name, ...rest);

const program = ts.createProgram([...sources.keys()], options, host);
const faults = ts.getPreEmitDiagnostics(program);
if (faults.length > 0) {
  console.error(ts.formatDiagnostics(faults, { getCurrentDirectory: () => here, getCanonicalFileName: (n) => n, getNewLine: () => '\n' }));
}
process.exit(faults.length > 0 ? 1 : 0);
