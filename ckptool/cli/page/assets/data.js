/** What the page shows: the content that was written into it, and its rows, a tensor each. */

import { byId } from "./dom.js";

/** Return the content; its rows are null where the file cannot be opened. */
export async function readContent() {
	const content = JSON.parse(byId("content").textContent);
	const rows = content.tensors === null ? null : new Rows(await inflated(content.tensors));
	return { ...content, rows };
}

async function inflated(text) {
	const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
	const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
	return new Response(stream).json();
}

/** The tensors of one file, or those of two by name. */
export class Rows {
	constructor(columns) {
		this.names = decodedNames(columns.names);
		this.number = this.names.length;
		this.kinds = columns.kinds.map(([shape, dtype, device, nbytes, numel, what, parts]) => ({
			shape: `[${shape.join(", ")}]`, dtype, device, nbytes, numel, what, parts,
		}));
		this.sides = columns.kind;
		this.isComparison = columns.kind.length > 1;
		this.tiedTo = new Map(columns.ties);
		this.roles = columns.role ? columns.role.of.map((role) => columns.role.roles[role]) : null;
		this.changes = columns.change ? columns.change.of.map((one) => columns.change.statuses[one]) : null;
		this.measures = columns.measures ? measuresByRow(columns.measures) : new Map();
		this.hasLikeness = [...this.measures.values()].some((one) => one.relative !== null);
		this.statistics = (columns.values ?? []).map((values) => new Statistics(values));
	}

	/** Return what a tensor is; of two files, in the second if it has it. */
	kind(row) {
		return this.kindIn(this.sides.length - 1, row) ?? this.kindIn(0, row);
	}

	/** Return what a tensor is in one of the files; null if it is not there. */
	kindIn(side, row) {
		const at = this.sides[side][row];
		return at < 0 ? null : this.kinds[at];
	}

	/** Return a number that is equal for tensors that are the same but for their names and values; NaN differ. */
	likeness(row) {
		return this.sides.map((side) => side[row]).join() + (this.changes ? this.changes[row] : "") + this.hasNaN(row);
	}

	/** Return whether there are NaN among the values, as far as they were looked at. */
	hasNaN(row) {
		return this.statistics.some((one) => one.has(row) && one.value("nan", row) > 0) || this.measures.get(row)?.nan > 0;
	}

	/** Return for each row the text that is searched. */
	searched() {
		const facts = this.kinds.map((kind) => ` ${kind.dtype} ${kind.device} ${kind.shape}`);
		const last = this.sides.length - 1;
		return this.names.map((name, row) => {
			const kind = this.sides[last][row] < 0 ? this.sides[0][row] : this.sides[last][row];
			return `${name}${facts[kind]} ${this.changes ? this.changes[row] : ""}`.toLowerCase();
		});
	}
}

/** What the values of one file's tensors are like. */
class Statistics {
	constructor(columns) {
		this.columns = columns;
		this.why = new Map(columns.why);
		this.starts = [];
		let start = 0;
		for (const total of columns.total) {
			this.starts.push(total === null ? -1 : start);
			start += total === null ? 0 : 8;
		}
	}

	has(row) {
		return this.starts[row] >= 0;
	}

	value(name, row) {
		return this.columns[name][row];
	}

	histogram(row) {
		return this.columns.histogram.slice(this.starts[row], this.starts[row] + 8);
	}
}

function decodedNames({ shared, rest }) {
	let before = "";
	return rest.map((text, at) => {
		before = before.slice(0, shared[at]) + text;
		return before;
	});
}

function measuresByRow(columns) {
	const names = Object.keys(columns).filter((name) => name !== "row");
	const found = new Map();
	columns.row.forEach((row, at) => {
		found.set(row, Object.fromEntries(names.map((name) => [name, columns[name][at]])));
	});
	return found;
}
