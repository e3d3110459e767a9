// Opens a report in Chromium as a phone and a desk see it, light and dark, and prints what is wrong with it as JSON.
// node look_at_report.cjs REPORT.html [FOLDER FOR SCREENSHOTS]; needs playwright-core and axe-core (NODE_PATH).
const path = require("path");
const { pathToFileURL } = require("url");
const { chromium } = require("playwright-core");
const axe = require("axe-core");

const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];

async function look(browser, file, width, scheme, folder) {
  const found = [];
  const page = await browser.newPage({ viewport: { width, height: 900 }, colorScheme: scheme });
  page.on("console", (message) => message.type() === "error" && found.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => found.push(`error: ${error.message}`));
  page.on("request", (request) => /^https?:/.test(request.url()) && found.push(`network: ${request.url()}`));
  await page.goto(pathToFileURL(path.resolve(file)).href);
  if (folder) await page.screenshot({ path: path.join(folder, `${width}-${scheme}.png`), fullPage: true });
  await page.evaluate(() => document.querySelectorAll("details").forEach((item) => (item.open = true)));
  if (folder) await page.screenshot({ path: path.join(folder, `${width}-${scheme}-open.png`), fullPage: true });
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (wide > 0) found.push(`scrolls sideways by ${wide} px`);
  const shown = await page.evaluate(() => [...document.querySelectorAll("figure")].map(
    (figure) => [...figure.querySelectorAll("svg[role=img]")].filter((svg) => svg.getBoundingClientRect().width > 0).length));
  if (shown.some((count) => count !== 1)) found.push(`charts shown per figure: ${shown}`);
  await page.evaluate(axe.source);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  for (const { impact, id, help, nodes } of violations)
    found.push(`axe ${impact}: ${id}: ${help}: ${nodes[0].html.slice(0, 160)}`);
  await page.close();
  return found.map((text) => `${width} ${scheme}: ${text}`);
}

(async () => {
  const [file, folder] = process.argv.slice(2);
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: FLAGS });
  const found = [];
  for (const width of [360, 390, 1280])
    for (const scheme of ["light", "dark"]) found.push(...(await look(browser, file, width, scheme, folder)));
  await browser.close();
  console.log(JSON.stringify(found));
})();
