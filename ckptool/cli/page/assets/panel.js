/** All about what is selected, or pointed at: a module, or a tensor. */

import { byId, definitions, element } from "./dom.js";
import { histogram } from "./histogram.js";
import { on } from "./selection.js";
import { SIDES, bytes, count, counted, measured, percent, roughCount } from "./text.js";
import { nameOf } from "./treemap.js";
import { lookedThrough, tensorsOf } from "./tree.js";

const LARGEST = 5;

export class Panel {
	constructor(rows, treemap) {
		this.rows = rows;
		this.treemap = treemap;
		this.home = byId("panel");
		this.selected = treemap.focus;
		on("selected", (group) => {
			this.selected = group;
			this.show({ group, many: 0 });
		});
		on("pointed", (pointed) => this.show(pointed ?? { group: this.selected, many: 0 }));
		this.show({ group: this.selected, many: 0 });
	}

	show({ group, many }) {
		this.home.replaceChildren(...(many ? this.rest(group, many) : group.isTensor ? this.tensor(group) : this.module(group)));
	}

	rest(group, many) {
		return [element("h3", {}, `${count(many)} more`), element("p", {}, `in ${this.title(group)}, each too small to be drawn`)];
	}

	module(group) {
		const each = group.number > 1 ? `, ${count(group.tensors / group.number)} in each` : "";
		return [
			element("h3", {}, this.title(group)),
			element("p", {}, group.number > 1 ? `${counted(group.number, "module")} of one shape` : "module"),
			definitions([
				["tensors", count(group.tensors) + each],
				["elements", roughCount(group.numel)],
				["size", `${bytes(group.nbytes)}, ${this.treemap.share(group)} of all`],
				["types", this.types(group)],
			]),
			...this.largest(group),
		];
	}

	/** Return the types in a module, those with the most bytes first. */
	types(group) {
		const sizes = new Map();
		for (const { row } of tensorsOf(group.first)) {
			const { dtype, nbytes } = this.rows.kind(row);
			sizes.set(dtype, (sizes.get(dtype) ?? 0) + nbytes);
		}
		const whole = [...sizes.values()].reduce((sum, size) => sum + size, 0);
		const ranked = [...sizes].sort(([, one], [, other]) => other - one).slice(0, LARGEST);
		return ranked.map(([dtype, size]) => (sizes.size > 1 ? `${dtype}, ${percent(size, whole)}` : dtype));
	}

	/** Return the largest of what is directly in a module. */
	largest(group) {
		const inside = group.inside(this.treemap.fold).map((one) => lookedThrough(one, this.treemap.fold));
		if (inside.length < 2) return [];
		inside.sort((one, other) => other.nbytes - one.nbytes);
		const lines = inside.slice(0, LARGEST).map((one) => [nameOf(one), bytes(one.nbytes)]);
		return [element("h4", {}, "Largest in it"), definitions(lines, "largest")];
	}

	tensor(group) {
		const { row } = group.first;
		const times = group.number > 1 ? [["alike", `${count(group.number)}, ${bytes(group.nbytes)} in all`]] : [];
		const found = [element("h3", {}, group.number > 1 ? this.title(group) : this.rows.names[row])];
		const what = this.rows.kind(row).what;
		found.push(element("p", {}, what ?? "tensor"), definitions([...this.facts(row), ...times]));
		if (this.rows.changes) found.push(...this.change(row));
		this.rows.statistics.forEach((statistics, side) => found.push(...this.values(statistics, side, row)));
		return found;
	}

	title(group) {
		if (group.number === 1) return group.first.path || "everything";
		const [first, last] = [group.first.path.split("."), group.nodes.at(-1).path.split(".")];
		return first.map((part, at) => (part === last[at] ? part : `${part}–${last[at]}`)).join(".");
	}

	facts(row) {
		const sides = this.rows.sides.map((_, side) => this.rows.kindIn(side, row));
		const inEach = (text) => [...new Set(sides.filter(Boolean).map(text))].join(" → ");
		const kind = this.rows.kind(row);
		const facts = [
			["shape", inEach((one) => one.shape)],
			["type", inEach((one) => one.dtype)],
			["device", inEach((one) => one.device)],
			["elements", inEach((one) => roughCount(one.numel))],
			["size", inEach((one) => bytes(one.nbytes))],
		];
		if (this.rows.roles) facts.push(["role", this.rows.roles[row]]);
		if (kind.parts) facts.push(["parts", kind.parts]);
		if (this.rows.tiedTo.has(row)) facts.push(["tied to", this.rows.names[this.rows.tiedTo.get(row)]]);
		return facts;
	}

	change(row) {
		const facts = [["change", this.rows.changes[row]]];
		const found = this.rows.measures.get(row);
		if (found) {
			const { numel } = this.rows.kind(row);
			facts.push(["differing", `${count(found.differing)} of ${count(numel)}, ${percent(found.differing, numel)}`]);
			if (found.nan) facts.push(["NaN in one", count(found.nan)]);
			facts.push(["largest |a−b|", measured(found.max_abs)]);
			facts.push(["at", `[${found.at.join(", ")}]: ${measured(found.a)} → ${measured(found.b)}`]);
			if (found.relative !== null) facts.push(["‖A−B‖ / ‖B‖", measured(found.relative)]);
			if (found.cosine !== null) facts.push(["cosine", measured(found.cosine)]);
		}
		return [element("h4", {}, "A and B"), definitions(facts)];
	}

	values(statistics, side, row) {
		const title = this.rows.isComparison ? [element("h4", {}, `Values in ${SIDES[side]}`)] : [];
		if (!statistics.has(row)) {
			const why = statistics.why(row);
			return why ? [...title, element("p", {}, why)] : [];
		}
		const value = (name) => statistics.value(name, row);
		const facts = ["mean", "std", "norm"].map((name) => [name, measured(value(name))]);
		for (const [name, label] of [["zeros", "zeros"], ["nan", "NaN"], ["infinite", "infinite"]]) {
			if (value(name)) facts.push([label, `${count(value(name))}, ${percent(value(name), value("total"))}`]);
		}
		const axis = element("div", { class: "axis" }, element("span", {}, measured(value("min"))), element("span", {}, measured(value("max"))));
		const drawing = value("min") === null ? [] : [histogram(value("histogram")), axis];
		return [...title, ...drawing, definitions(facts)];
	}
}
