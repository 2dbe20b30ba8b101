/** Put everything on the page. */

import { byId, element } from "./dom.js";
import { isDark, schemes } from "./colours.js";
import { columnsFor } from "./columns.js";
import { readContent } from "./data.js";
import { FileTable } from "./files.js";
import { showHead } from "./head.js";
import { Panel } from "./panel.js";
import { tell } from "./selection.js";
import { Table } from "./table.js";
import { counted, cutMiddle } from "./text.js";
import { Treemap } from "./treemap.js";
import { Group, grownTree } from "./tree.js";

const MANY_LAYERS = 8;
const LONGEST_LABEL = 40;

const content = await readContent();
showHead(content);
if (content.files[0].files) {
	byId("files").hidden = false;
	new FileTable(content.files[0].files);
}
if (content.rows?.number) showTensors(content.rows);
document.documentElement.dataset.ready = "true";
performance.mark("ready");

function showTensors(rows) {
	byId("map").hidden = byId("tensors").hidden = false;
	const nodes = grownTree(rows);
	const found = schemes(rows, nodes);
	const treemap = new Treemap(nodes[0]);
	treemap.scheme = found[0];
	showChoices(treemap, found, rows, nodes);
	treemap.draw();
	treemap.showCrumbs();
	new Table(rows, nodes, columnsFor(rows, found[0]));
	new Panel(rows, treemap);
	showNaN(nodes.filter((node) => node.isTensor && rows.hasNaN(node.row)));
	matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
		showLegend(treemap.scheme);
		tell("inked");
	});
}

/** Show what can be chosen of the treemap: the colours, and whether equal layers are one box. */
function showChoices(treemap, found, rows, nodes) {
	const choice = byId("scheme");
	choice.append(...found.map((scheme) => element("option", { value: scheme.id }, scheme.title)));
	choice.addEventListener("change", () => {
		treemap.scheme = found.find((scheme) => scheme.id === choice.value);
		showLegend(treemap.scheme);
		treemap.redraw();
	});
	const fold = byId("fold");
	byId("fold-label").hidden = !nodes.some((node) => hasEqualLayers(node));
	fold.checked = !rows.isComparison && nodes.some((node) => hasEqualLayers(node, MANY_LAYERS));
	treemap.setFold(fold.checked);
	fold.addEventListener("change", () => {
		treemap.setFold(fold.checked);
		treemap.enter(treemap.stack);
	});
	showLegend(treemap.scheme);
}

/** Show at the top that there are NaN; a click shows the row of the first tensor with some, then that of the next. */
function showNaN(leaves) {
	if (!leaves.length) return;
	let at = 0;
	const show = () => {
		const leaf = leaves[at % leaves.length];
		at += 1;
		tell("selected", new Group(leaf.name, [leaf]));
		byId("tensors").scrollIntoView();
	};
	const text = `NaN in ${counted(leaves.length, "tensor")}: ${cutMiddle(leaves[0].path, LONGEST_LABEL)} ↓`;
	document.querySelector(".chips").append(element("button", { type: "button", class: "nan", onclick: show }, text));
}

function hasEqualLayers(node, atLeast = 2) {
	const counts = new Map();
	for (const child of node.children) {
		if (!child.isTensor && /^\d+$/.test(child.name)) counts.set(child.likeness, (counts.get(child.likeness) ?? 0) + 1);
	}
	return Math.max(0, ...counts.values()) >= atLeast;
}

function showLegend(scheme) {
	const theme = isDark() ? "dark" : "light";
	const entries = scheme.entries.map(({ label, colour }) => {
		const swatch = element("i");
		swatch.style.backgroundColor = colour(theme).fill;
		return element("li", {}, swatch, cutMiddle(label || "(empty)", LONGEST_LABEL));
	});
	byId("legend").replaceChildren(...entries);
}
