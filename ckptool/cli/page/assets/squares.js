/** Squarified treemaps: rectangles of given areas, as square as can be. Bruls, Huizing and van Wijk, 2000. */

/** Return a rectangle for each size, in the order of the sizes, which are the largest first. */
export function squares(sizes, x, y, width, height) {
	const whole = sizes.reduce((sum, size) => sum + size, 0);
	const scale = whole ? (width * height) / whole : 0;
	const found = [];
	let left = { x, y, width, height };
	let at = 0;
	while (at < sizes.length) {
		const side = Math.min(left.width, left.height);
		let end = at + 1;
		let area = sizes[at] * scale;
		let worst = ratio(sizes[at] * scale, area, side);
		while (end < sizes.length) {
			const larger = area + sizes[end] * scale;
			const next = Math.max(ratio(sizes[at] * scale, larger, side), ratio(sizes[end] * scale, larger, side));
			if (next > worst) break;
			worst = next;
			area = larger;
			end += 1;
		}
		left = placeRow(found, sizes.slice(at, end), area, scale, left);
		at = end;
	}
	return found;
}

/** Return how much longer than wide a rectangle of this area is in a row along a side. */
function ratio(area, rowArea, side) {
	const depth = rowArea / side;
	const length = area / depth;
	return Math.max(depth / length, length / depth);
}

function placeRow(found, sizes, area, scale, left) {
	const isWide = left.width >= left.height;
	const depth = area / (isWide ? left.height : left.width) || 0;
	let along = isWide ? left.y : left.x;
	for (const size of sizes) {
		const length = depth ? (size * scale) / depth : 0;
		found.push(
			isWide
				? { x: left.x, y: along, width: depth, height: length }
				: { x: along, y: left.y, width: length, height: depth },
		);
		along += length;
	}
	return isWide
		? { ...left, x: left.x + depth, width: Math.max(0, left.width - depth) }
		: { ...left, y: left.y + depth, height: Math.max(0, left.height - depth) };
}
