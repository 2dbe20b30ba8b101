/** What the files are, what is notable about them, and the commands that do something about it. */

import { byId, definitions, element } from "./dom.js";
import { tell } from "./selection.js";
import { SIDES, bytes, count, counted } from "./text.js";

const SEVEREST = ["error", "warning", "info"];
const WORDS = { error: "Error", warning: "Warning", info: "Note" };

export function showHead({ files, compared, version }) {
	byId("head").append(...(compared === null ? ofOne(files[0]) : ofTwo(files, compared)));
	if (compared !== null) {
		byId("about").append(...differences(files, compared));
		byId("about").hidden = false;
	}
	byId("foot").append(...foot(files, version));
}

function ofOne(file) {
	return [
		element("h1", {}, file.name),
		file.path === file.name ? null : element("p", { class: "path" }, file.path),
		verdict(file.verdict, WORDS[file.worst] && file.worst !== "info" ? file.worst : "fine"),
		element("p", { class: "chips" }),
		definitions(factsOf(file), "facts"),
		findingList(reasons(file)),
		others(file),
	].filter(Boolean);
}

/** Two files are their names and how they compare; the map comes next, and what else differs behind it. */
function ofTwo(files, compared) {
	const sides = files.map((file, at) => {
		const worst = ["warning", "error"].includes(file.worst) ? file.worst : "fine";
		return element("div", { class: "side" }, element("b", {}, SIDES[at]), " ", element("span", { class: "path" }, file.path), verdict(file.verdict, worst));
	});
	return [
		element("h1", {}, `${files[0].name} → ${files[1].name}`),
		verdict(compared.verdict, compared.same ? "fine" : "different"),
		element("p", { class: "chips" }),
		element("div", { class: "sides" }, ...sides),
	];
}

function differences(files, compared) {
	const [a, b] = files.map((file) => new Map(factsOf(file)));
	const labels = [...new Set([...a.keys(), ...b.keys()])];
	const rows = labels.map((label) => [label, a.get(label) ?? [], b.get(label) ?? []]).filter(([, one, other]) => String(one) !== String(other));
	const cell = (lines) => element("td", {}, ...lines.map((line) => element("div", {}, line)));
	const heads = ["", ...files.map((file, at) => `${SIDES[at]} · ${file.name}`)];
	const table = element("table", { class: "plain" },
		element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
		element("tbody", {}, ...rows.map(([label, one, other]) => element("tr", {}, element("th", { scope: "row" }, label), cell(one), cell(other)))));
	const found = files.flatMap((file, at) => reasons(file).map((one) => ({ ...one, code: `${one.code} ${SIDES[at]}` })));
	return [
		element("h2", {}, "What differs"),
		compared.facts.length ? definitions(compared.facts, "facts") : null,
		rows.length ? element("div", { class: "scroller" }, table) : null,
		findingList(found),
		...files.map(others),
	].filter(Boolean);
}

function verdict(text, state) {
	return element("p", { class: `verdict ${state}` }, text.charAt(0).toUpperCase() + text.slice(1));
}

function factsOf(file) {
	const facts = file.loading?.length ? [...(file.facts ?? []), ["loading", file.loading]] : file.facts ?? [];
	return facts.map(([label, lines]) => [label, lines.map((line) => line.replace("  <- the weights", " ← the weights"))]);
}

/** Return why a file cannot be opened, and what was found in it, the severest first. */
function reasons(file) {
	const error = file.error ? [{ ...file.error, severity: "error", code: file.error.kind }] : [];
	const order = (one) => SEVEREST.indexOf(one.severity);
	return [...error, ...file.findings].sort((one, other) => order(one) - order(other));
}

function others(file) {
	if (!file.extras?.length) return null;
	const lines = file.extras.map((line) => element("li", { class: "mono" }, line));
	return element("details", {}, element("summary", {}, "Values that are not tensors"), element("ul", {}, ...lines));
}

/** Return a card for each command, with all findings that it does something about, and for each finding without one. */
function findingList(findings) {
	const cards = new Map();
	for (const [at, found] of findings.entries()) {
		const key = found.command ?? at;
		cards.set(key, [...(cards.get(key) ?? []), found]);
	}
	return cards.size ? element("ul", { class: "findings" }, ...[...cards.values()].map(card)) : null;
}

function card(findings) {
	const made = element("li", { class: `finding ${findings[0].severity}` });
	for (const { severity, code, message, hint, files, some } of findings) {
		const badge = element("div", { class: "badge" }, WORDS[severity], element("small", {}, code));
		const said = element("div", {}, element("p", {}, message), hint ? element("p", { class: "quiet" }, hint) : null);
		if (files !== undefined) {
			const button = element("button", { type: "button", onclick: () => tell("files", code) }, "Show");
			said.append(element("p", { class: "quiet" }, `${counted(files, "file")}: ${some} `, button));
		}
		made.append(badge, said);
	}
	if (findings[0].command) made.append(commandLine(findings[0].command));
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

/** Return what says later which version wrote a page, and of which files. */
function foot(files, version) {
	const lines = files.flatMap(({ path, nbytes, digests }) => {
		const size = nbytes === undefined ? "" : ` · ${bytes(nbytes)} (${count(nbytes)} bytes)`;
		const known = Object.entries(digests ?? {}).filter(([, digest]) => digest);
		return [`${path}${size}`, ...known.map(([what, digest]) => `${what} ${digest}`)];
	});
	return [`Written by ckptool ${version}. Nothing in the file was run.`, ...lines].map((line) => element("p", {}, line));
}
