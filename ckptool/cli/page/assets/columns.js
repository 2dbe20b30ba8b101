/** The columns of the table: what a row shows, how rows are sorted, and what a module's tensors come to. */

import { element } from "./dom.js";
import { isDark, magnitude } from "./colours.js";
import { histogram } from "./histogram.js";
import { aligned, bytes, count, measured, percent } from "./text.js";

/**
 * Return the columns that tell something of these rows.
 *
 * `cell` gives text or an element for a tensor, `total` text for a module, `key` a number or text to sort by, and `join`
 * makes one key of those of a module's tensors; without it modules cannot be sorted by the column.
 */
export function columnsFor(rows, scheme) {
	const found = [
		{ id: "shape", title: "shape", width: 8, cell: (row) => shapes(rows, row), key: (row) => rows.kind(row).shape },
		{ id: "dtype", title: "type", width: 5.5, cell: (row) => inEach(rows, row, "dtype"), key: (row) => rows.kind(row).dtype },
	];
	if (rows.names.some((_, row) => rows.kind(row).device !== rows.kind(0).device)) {
		const device = (row) => inEach(rows, row, "device");
		found.push({ id: "device", title: "device", width: 5, spare: true, cell: device, key: (row) => rows.kind(row).device });
	}
	found.push(
		number("numel", "elements", 7, (row) => rows.kind(row).numel, count, { join: together, total: (node) => count(node.numel), spare: true }),
		number("nbytes", "size", 5.2, (row) => rows.kind(row).nbytes, bytes, { join: together, total: (node) => bytes(node.nbytes) }),
	);
	if (rows.isComparison) found.push(...ofChanges(rows, scheme));
	else if (rows.statistics.length) found.push(...ofValues(rows.statistics[0]));
	return found;
}

function ofChanges(rows, scheme) {
	const measure = (id, title, join) => {
		const value = (row) => rows.measures.get(row)?.[id] ?? null;
		return number(id, title, 6.5, value, measured, { join, spare: id !== "max_abs" });
	};
	const chip = (row) => {
		const swatch = element("i");
		swatch.style.backgroundColor = scheme.colour({ row }, isDark() ? "dark" : "light").fill;
		return element("span", { class: "chip" }, swatch, rows.changes[row]);
	};
	const isChanged = (row) => (["same", "not compared"].includes(rows.changes[row]) ? 0 : 1);
	const found = [
		{
			id: "change", title: "change", width: 8, cell: chip, key: (row) => (isChanged(row) ? magnitude(rows, row) ?? Infinity : -1),
			join: Math.max, total: (node, changed) => (changed ? `${count(changed)} differ${changed === 1 ? "s" : ""}` : "same"), counts: isChanged,
		},
	];
	if (rows.measures.size) {
		const share = (row) => {
			const differing = rows.measures.get(row)?.differing;
			return differing === undefined ? null : differing / rows.kind(row).numel;
		};
		found.push(number("share", "differing", 6, share, (value) => (value === null ? "–" : percent(value, 1)), { join: Math.max, total: nothing, spare: true }));
		found.push(measure("max_abs", "largest |a−b|", Math.max));
		const has = (id) => [...rows.measures.values()].some((one) => one[id] !== null);
		if (has("relative")) found.push(measure("relative", "‖A−B‖ / ‖B‖", Math.max));
		if (has("cosine")) found.push(measure("cosine", "cosine", Math.min));
	}
	return found;
}

function ofValues(statistics) {
	const value = (name) => (row) => (statistics.has(row) ? statistics.value(name, row) : null);
	const part = (name) => (row) => (statistics.has(row) ? statistics.value(name, row) / (statistics.value("total", row) || 1) : null);
	const share = (found) => (found ? percent(found, 1) : "–");
	const found = [
		number("mean", "mean", 6, value("mean"), aligned, {}),
		number("std", "std", 6, value("std"), aligned, {}),
		number("min", "min", 6, value("min"), aligned, { join: Math.min, spare: true }),
		number("max", "max", 6, value("max"), aligned, { join: Math.max, spare: true }),
		number("zeros", "zeros", 4.5, part("zeros"), share, { join: Math.max, total: nothing, spare: true }),
	];
	for (const [id, title] of [["nan", "NaN"], ["infinite", "inf"]]) {
		if (statistics.found.some((one) => one?.[id])) found.push(number(id, title, 3.8, value(id), count0, { join: together }));
	}
	const bars = (row) => (statistics.has(row) ? histogram(statistics.value("histogram", row)) : "–");
	return [...found, { id: "histogram", title: "histogram", width: 6.5, cell: bars }];
}

function together(one, other) {
	return one + other;
}

/** What a module has of a column that says something of single tensors alone. */
function nothing() {
	return "";
}

function number(id, title, width, key, text, more) {
	return { id, title, width, key, cell: (row) => text(key(row)), isNumber: true, text, ...more };
}

function count0(number) {
	return number ? count(number) : "–";
}

function shapes(rows, row) {
	return inEach(rows, row, "shape");
}

/** Return what a field is; of two files in which it differs, in both. */
function inEach(rows, row, field) {
	const found = rows.sides.map((_, side) => rows.kindIn(side, row)?.[field]).filter((one) => one !== undefined);
	return [...new Set(found)].join(" → ");
}
