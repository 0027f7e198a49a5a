// Run the site's own search as its search page does, without a browser: node site_search.js SITE QUERY...
// Prints a JSON object of each query's pages.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const page = fs.readFileSync(path.join(site, "search.html"), "utf8");
const context = {
  document: {
    documentElement: { dataset: { content_root: "" } },
    addEventListener() {},
    getElementById: () => null,
    readyState: "loading",
  },
  localStorage: { setItem() {}, getItem() {} },
  setTimeout,
  URLSearchParams,
  console,
};
context.window = context;
vm.createContext(context);
// The scripts of the search page, in its order, but the theme's, which move things on the screen.
for (const [, source] of page.matchAll(/<script[^>]* src="([^"?]+)/g)) {
  if (!source.includes("scripts/")) vm.runInContext(fs.readFileSync(path.join(site, source), "utf8"), context);
}
const found = {};
for (const query of queries) {
  const code = `Search._performSearch(...Search._parseQuery(${JSON.stringify(query)})).map((r) => r[0])`;
  found[query] = vm.runInContext(code, context);
}
console.log(JSON.stringify(found));
