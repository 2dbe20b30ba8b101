/** How values spread from the least to the largest, as bars. */

const NAMESPACE = "http://www.w3.org/2000/svg";

/** Return a drawing of counts, each as high as its share of the highest; what is not zero can be seen. */
export function histogram(counts) {
	const highest = Math.max(...counts, 1);
	const drawing = shape("svg", { class: "histogram", viewBox: `0 0 ${counts.length * 10} 100`, preserveAspectRatio: "none" });
	drawing.setAttribute("role", "img");
	drawing.setAttribute("aria-label", `Histogram: ${counts.join(", ")}`);
	const bars = counts.map((number, at) => {
		const height = number ? Math.max(3, (100 * number) / highest) : 0;
		return `M${at * 10 + 0.5} 100v${-height}h9v${height}z`;
	});
	drawing.append(shape("path", { d: bars.join("") }));
	return drawing;
}

function shape(tag, attributes) {
	const made = document.createElementNS(NAMESPACE, tag);
	for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
	return made;
}
