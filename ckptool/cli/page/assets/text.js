/** Numbers as people read them. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const GROUPED = new Intl.NumberFormat("en-US");
const ROUGH = [[1e12, "T"], [1e9, "B"], [1e6, "M"]];

/** What two files are called. */
export const SIDES = ["A", "B"];

/** Return a count with commas; one that is too large to be exact here with its power of ten. */
export function count(number) {
	return Number.isSafeInteger(number) ? GROUPED.format(number) : number.toPrecision(4);
}

/** Return a count and its noun. */
export function counted(number, noun) {
	return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Return a count, and what people call it where it is large. */
export function roughCount(number) {
	const found = ROUGH.find(([size]) => number >= 0.9995 * size);
	return found ? `${count(number)} (${threeDigits(number / found[0])}${found[1]})` : count(number);
}

/** Return a size: three digits and a binary unit, as ckptool prints it. */
export function bytes(number) {
	let size = number;
	let unit = 0;
	while (size >= 1000 && unit < UNITS.length - 1) {
		size /= 1024;
		unit += 1;
	}
	return unit ? `${threeDigits(size)} ${UNITS[unit]}` : `${count(number)} B`;
}

/** Return a share of a whole in percent. */
export function percent(part, whole) {
	if (!whole || !part) return part ? "–" : "0 %";
	const share = (100 * part) / whole;
	return share < 0.1 ? "< 0.1 %" : `${share.toFixed(share < 9.95 ? 1 : 0)} %`;
}

/** Return a measured number to four digits; what is not a number as it is. */
export function measured(value) {
	if (value === null || value === undefined) return "–";
	if (typeof value === "string") return value === "inf" ? "∞" : value === "-inf" ? "−∞" : value;
	if (value === 0 || Number.isSafeInteger(value)) return String(value);
	const size = Math.abs(value);
	return size >= 1e-4 && size < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(3).replace(/\.?0+e/, "e");
}

/** Return a measured number for a column: with four digits behind the point where that says enough of it. */
export function aligned(value) {
	const size = Math.abs(value);
	return typeof value === "number" && size >= 1e-3 && size < 1e4 && !Number.isSafeInteger(value) ? value.toFixed(4) : measured(value);
}

/** Return text of at most so many characters: its beginning and its end. */
export function cutMiddle(text, most) {
	if (text.length <= most) return text;
	const tail = Math.max(1, Math.ceil((most - 1) * 0.6));
	return `${text.slice(0, Math.max(0, most - 1 - tail))}…${text.slice(text.length - tail)}`;
}

/** Return a number with three digits; halves go to the even one, as Python has it. */
function threeDigits(value) {
	const unit = 10 ** (Math.floor(Math.log10(value)) - 2);
	const tens = value / unit;
	const isHalf = tens % 1 === 0.5 && Math.floor(tens) % 2 === 0;
	return String(Number((isHalf ? Math.floor(tens) * unit : value).toPrecision(3)));
}
