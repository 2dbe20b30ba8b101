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
	constructor(rows) {
		this.names = rows.map((one) => one.name);
		this.number = rows.length;
		this.tensors = rows.map((one) => one.tensors);
		this.sides = Array.from(rows[0]?.tensors ?? [], (_, side) => side);
		this.isComparison = this.sides.length > 1;
		this.tiedTo = new Map(rows.flatMap((one, row) => (one.tied_to === undefined ? [] : [[row, one.tied_to]])));
		this.roles = rows[0]?.role ? rows.map((one) => one.role) : null;
		this.changes = this.isComparison ? rows.map((one) => one.change) : null;
		this.measures = new Map(rows.flatMap((one, row) => (one.measures ? [[row, one.measures]] : [])));
		this.hasLikeness = [...this.measures.values()].some((one) => one.relative !== null);
		this.statistics = Array.from(rows[0]?.values ?? [], (_, side) => new Statistics(rows.map((one) => one.values[side])));
	}

	/** Return what a tensor is; of two files, in the second if it has it. */
	kind(row) {
		return this.tensors[row].at(-1) ?? this.tensors[row][0];
	}

	/** Return what a tensor is in one of the files; null if it is not there. */
	kindIn(side, row) {
		return this.tensors[row][side];
	}

	/** Return a text that is equal for tensors that are the same but for their names and values; NaN differ. */
	likeness(row) {
		return JSON.stringify(this.tensors[row]) + (this.changes ? this.changes[row] : "") + this.hasNaN(row);
	}

	/** Return whether there are NaN among the values, as far as they were looked at. */
	hasNaN(row) {
		return this.statistics.some((one) => one.has(row) && one.value("nan", row) > 0) || this.measures.get(row)?.nan > 0;
	}

	/** Return for each row the text that is searched. */
	searched() {
		return this.names.map((name, row) => {
			const kind = this.kind(row);
			return `${name} ${kind.dtype} ${kind.device} ${kind.shape} ${this.changes ? this.changes[row] : ""}`.toLowerCase();
		});
	}
}

/** What the values of one file's tensors are like: of each an object, or null. */
class Statistics {
	constructor(found) {
		this.found = found;
	}

	has(row) {
		return this.found[row]?.total !== undefined;
	}

	why(row) {
		return this.found[row]?.why;
	}

	value(name, row) {
		return this.found[row][name];
	}
}
