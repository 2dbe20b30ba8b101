/** Which colour a tensor has, and what it means. */

import { measured } from "./text.js";

const HUES = [255, 62, 155, 305, 25, 200, 100, 345];
const LIGHTNESS = { light: [0.76, 0.84, 0.8, 0.76, 0.78, 0.82, 0.87, 0.82], dark: [0.46, 0.5, 0.46, 0.44, 0.44, 0.48, 0.5, 0.46] };
const CHROMA = { light: 0.095, dark: 0.085 };
const REST = { light: "oklch(0.88 0.006 255)", dark: "oklch(0.36 0.008 255)" };
const STEPS = { light: [0.93, 0.84, 0.74, 0.62, 0.48], dark: [0.3, 0.38, 0.47, 0.64, 0.8] };
const INKS = { light: "#17181c", dark: "#ffffff" };
const NAN = { light: { fill: "oklch(0.55 0.22 27)", ink: "#ffffff" }, dark: { fill: "oklch(0.6 0.23 27)", ink: "#ffffff" } };
const TITLES = { layer: "by layer", dtype: "by type", role: "by role", change: "by change", device: "by device" };
const NEARLY_ALL = 0.95;
const OF_CHANGES = { shape: 4, "only in A": 1, "only in B": 2, dtype: 3, layout: 5, device: 6, close: 7 };

/** Return whether the page is dark. */
export function isDark() {
	return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Return the ways to colour that tell something of these tensors, the most telling first. */
export function schemes(rows, nodes) {
	const leaves = nodes.filter((node) => node.isTensor);
	const found = [];
	if (rows.changes) found.push(byChange(rows));
	if (rows.roles) found.push(byCategory("role", leaves, (leaf) => rows.roles[leaf.row]));
	found.push(byCategory("dtype", leaves, (leaf) => rows.kind(leaf.row).dtype));
	found.push(byCategory("layer", leaves, layerOf));
	found.push(byCategory("device", leaves, (leaf) => rows.kind(leaf.row).device));
	const telling = found.filter((scheme) => scheme.entries.length > 1 || scheme.id === "change");
	const even = telling.filter((scheme) => !(scheme.largest > NEARLY_ALL));
	const chosen = telling.length ? [...even, ...telling.filter((scheme) => !even.includes(scheme))] : found.slice(0, 1);
	return leaves.some((leaf) => rows.hasNaN(leaf.row)) ? chosen.map((scheme) => withNaN(scheme, rows)) : chosen;
}

/** Return a scheme in which tensors with NaN have a colour of their own. */
function withNaN(scheme, rows) {
	const isMarked = (leaf) => rows.hasNaN(leaf.row);
	const colour = (leaf, theme) => (isMarked(leaf) ? NAN[theme] : scheme.colour(leaf, theme));
	return { ...scheme, isMarked, colour, entries: [{ label: "NaN", colour: (theme) => NAN[theme] }, ...scheme.entries] };
}

/** Return what a layer is called: the nearest module that is not a number, or the tensor itself. */
function layerOf(leaf) {
	for (let node = leaf.parent; node?.parent; node = node.parent) {
		if (!/^\d+$/.test(node.name)) return node.name;
	}
	return leaf.name;
}

function byCategory(id, leaves, category) {
	const sizes = new Map();
	for (const leaf of leaves) {
		const name = category(leaf);
		sizes.set(name, (sizes.get(name) ?? 0) + leaf.nbytes);
	}
	const ranked = [...sizes].sort(([, one], [, other]) => other - one).map(([name]) => name);
	const places = new Map(ranked.slice(0, HUES.length).map((name, at) => [name, at]));
	const entries = ranked.slice(0, HUES.length).map((name, at) => ({ label: name, colour: (theme) => hue(at, theme) }));
	if (ranked.length > HUES.length) {
		const more = ranked.length - HUES.length;
		entries.push({ label: `${more} more`, colour: (theme) => ({ fill: REST[theme], ink: INKS[theme] }) });
	}
	const whole = leaves.reduce((sum, leaf) => sum + leaf.nbytes, 0);
	return {
		id,
		title: TITLES[id],
		entries,
		largest: (sizes.get(ranked[0]) ?? 0) / (whole || 1),
		colour: (leaf, theme) => {
			const at = places.get(category(leaf));
			return at === undefined ? { fill: REST[theme], ink: INKS[theme] } : hue(at, theme);
		},
	};
}

/** Changed values are the darker the more they differ, in five steps between the least and the largest difference. */
function byChange(rows) {
	const present = new Set(rows.changes);
	const sizes = rows.changes.map((change, row) => (change === "values" ? magnitude(rows, row) : null));
	const known = sizes.filter((size) => size > 0 && Number.isFinite(size)).map(Math.log10);
	const least = known.reduce((one, other) => Math.min(one, other), Infinity);
	const most = known.reduce((one, other) => Math.max(one, other), -Infinity);
	const step = (size) => {
		if (!(size > 0)) return 0;
		if (!Number.isFinite(size)) return 4;
		return most > least ? Math.min(4, Math.floor((5 * (Math.log10(size) - least)) / (most - least))) : 3;
	};
	const plain = (theme) => ({ fill: REST[theme], ink: INKS[theme] });
	const shade = (at, theme) => ({
		fill: `oklch(${STEPS[theme][at]} ${0.03 + 0.025 * at} 255)`,
		ink: STEPS[theme][at] >= 0.6 ? INKS.light : INKS.dark,
	});
	const entries = [];
	for (const change of ["same", "not compared"]) if (present.has(change)) entries.push({ label: change, colour: plain });
	if (present.has("values")) {
		const measure = rows.hasLikeness ? "‖A−B‖ / ‖B‖" : "largest |a−b|";
		const from = (at) => measured(Number((10 ** (least + (at * (most - least)) / 5)).toPrecision(2)));
		const used = new Set(sizes.filter((size) => size !== null).map(step));
		[...used].sort().forEach((at, place) => {
			const range = known.length ? `${most > least ? "from " : ""}${from(at)}` : "";
			entries.push({ label: place ? range : `values, ${measure} ${range}`, colour: (theme) => shade(at, theme) });
		});
	}
	for (const [change, at] of Object.entries(OF_CHANGES)) {
		if (present.has(change)) entries.push({ label: change, colour: (theme) => hue(at, theme) });
	}
	return {
		id: "change",
		title: TITLES.change,
		entries,
		colour: (leaf, theme) => {
			const change = rows.changes[leaf.row];
			if (change === "values") return shade(step(sizes[leaf.row]), theme);
			return change in OF_CHANGES ? hue(OF_CHANGES[change], theme) : plain(theme);
		},
	};
}

/**
 * Return by how much the values of a row differ: relatively if that is known of any row, else at most. What has become
 * NaN or infinite, or is compared with zeros alone, differs beyond all measure.
 */
export function magnitude(rows, row) {
	const found = rows.measures.get(row);
	if (!found) return null;
	if (found.nan || found.max_abs === "inf") return Infinity;
	return rows.hasLikeness ? (found.relative ?? (found.max_abs > 0 ? Infinity : null)) : found.max_abs;
}

const PALETTES = Object.fromEntries(
	["light", "dark"].map((theme) => [
		theme,
		HUES.map((angle, at) => ({ fill: `oklch(${LIGHTNESS[theme][at]} ${CHROMA[theme]} ${angle})`, ink: INKS[theme] })),
	]),
);

function hue(at, theme) {
	return PALETTES[theme][at];
}
