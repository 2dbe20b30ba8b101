/** What the files are, what is notable about them, and the commands that do something about it. */

import { byId, definitions, element } from "./dom.js";
import { SIDES } from "./text.js";

const SEVEREST = ["error", "warning", "info"];
const WORDS = { error: "Error", warning: "Warning", info: "Note" };

export function showHead({ files, compared, version }) {
	const head = byId("head");
	if (compared === null) head.append(...ofOne(files[0]));
	else head.append(...ofTwo(files, compared));
	byId("foot").textContent = `Written by ckptool ${version}. Nothing in the file was run.`;
}

function ofOne(file) {
	return [
		element("h1", {}, file.name),
		file.path === file.name ? null : element("p", { class: "path" }, file.path),
		...about(file, true),
	].filter(Boolean);
}

function ofTwo(files, compared) {
	const sides = files.map((file, at) => {
		const name = element("h2", {}, `${SIDES[at]} · ${file.name}`);
		return element("div", { class: "side" }, name, element("p", { class: "path" }, file.path), ...about(file, false));
	});
	return [
		element("h1", {}, `${files[0].name} → ${files[1].name}`),
		element("p", { class: "verdict" }, capital(compared.verdict)),
		definitions(compared.facts, "facts"),
		element("div", { class: "sides" }, ...sides),
	];
}

function about(file, isAlone) {
	const found = [element("p", { class: `verdict ${["warning", "error"].includes(file.worst) ? file.worst : "fine"}` }, capital(file.verdict))];
	const facts = [...(file.facts ?? [])];
	if (file.loading?.length) facts.push(["loading", file.loading]);
	const error = file.error ? [{ ...file.error, severity: "error", code: file.error.kind }] : [];
	const findings = [...error, ...file.findings];
	findings.sort((one, other) => SEVEREST.indexOf(one.severity) - SEVEREST.indexOf(other.severity));
	const parts = [facts.length ? definitions(facts, "facts") : null, findings.length ? findingList(findings) : null];
	found.push(...(isAlone ? parts : parts.reverse()).filter(Boolean));
	if (file.extras?.length) {
		const lines = file.extras.map((line) => element("li", { class: "mono" }, line));
		found.push(element("details", {}, element("summary", {}, "Values that are no tensors"), element("ul", {}, ...lines)));
	}
	return found;
}

function findingList(findings) {
	return element("ul", { class: "findings" }, ...findings.map(finding));
}

function finding({ severity, code, message, hint, command }) {
	const badge = element("div", { class: "badge" }, WORDS[severity], element("small", {}, code));
	const made = element("li", { class: `finding ${severity}` }, badge, element("p", {}, message));
	if (hint) made.append(element("p", { class: "quiet" }, hint));
	if (command) made.append(commandLine(command));
	return made;
}

/** Return a command with a button that copies it, or selects it where the browser lets no page copy. */
function commandLine(command) {
	const text = element("code", {}, command);
	const button = element("button", { type: "button", "aria-label": `Copy: ${command}` }, "Copy");
	button.addEventListener("click", async () => {
		try {
			await navigator.clipboard.writeText(command);
			button.textContent = "Copied";
		} catch {
			getSelection().selectAllChildren(text);
			button.textContent = "Selected";
		}
		setTimeout(() => (button.textContent = "Copy"), 1500);
	});
	return element("div", { class: "command" }, text, button);
}

function capital(text) {
	return text.charAt(0).toUpperCase() + text.slice(1);
}
