// Validates custom resources by the schemas in the npm packages @kubernetes-models/*.
//
//   node custom_resources.mjs NODE_MODULES < objects.json    prints a JSON list of problems
//
// The schemas let unknown fields pass, and so does an API server, which drops them: a misspelt field would do nothing.
// So each object is read through a proxy that notes which fields its schema asked for.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const PACKAGES = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

function watched(value, path, unread) {
  if (value === null || typeof value !== "object") return value;
  const inside = new Map(Object.entries(value).map(([key, child]) => [key, watched(child, `${path}/${key}`, unread)]));
  if (!Array.isArray(value)) for (const key of inside.keys()) unread.add(`${path}/${key}`);
  return new Proxy(value, {
    get(target, key) {
      unread.delete(`${path}/${String(key)}`);
      return inside.has(key) ? inside.get(key) : target[key];
    },
  });
}

async function problems(object, modules) {
  const [group] = object.apiVersion.split("/");
  const name = `${object.kind} ${object.metadata.name}`;
  const file = `${modules}/@kubernetes-models/${PACKAGES[group]}/${object.apiVersion}/${object.kind}.js`;
  const model = (await import(pathToFileURL(file)))[object.kind];
  const unread = new Set();
  try {
    model.prototype.validate.call(watched(object, "", unread));
  } catch (error) {
    return [`${name}: ${error.message}`];
  }
  return [...unread].filter((path) => path.startsWith("/spec/")).map((path) => `${name}: no such field: ${path}`);
}

const objects = JSON.parse(readFileSync(0, "utf8"));
const found = await Promise.all(objects.map((object) => problems(object, process.argv[2])));
console.log(JSON.stringify(found.flat()));
