/** Names as a tree: modules with their totals, chains of one child looked through, equal layers taken together. */

const DEEPEST = 32;
const NUMBER = /^(0|[1-9]\d{0,8})$/;
const NUMBERS = /\d+/g;
const BY_NUMBER = new Intl.Collator("en", { numeric: true });

/** A module, or a tensor, which has a row. */
class Node {
	constructor(name, parent) {
		this.name = name;
		this.parent = parent;
		this.children = [];
		this.row = -1;
		this.at = 0;
		this.tensors = 0;
		this.numel = 0;
		this.nbytes = 0;
		this.likeness = 0;
		this.modules = null;
	}

	get isTensor() {
		return this.row >= 0;
	}

	/** Return the children in the order of those of a node that is alike. */
	childrenLike(other) {
		if (other === this) return this.children;
		const known = new Map(this.children.map((child) => [`${child.isTensor} ${child.name}`, child]));
		return other.children.map((child) => known.get(`${child.isTensor} ${child.name}`));
	}

	/** The full name. */
	get path() {
		const parts = [];
		for (let node = this; node.parent; node = node.parent) parts.unshift(node.name);
		return parts.join(".");
	}
}

/** Return all nodes, each behind its parent: the root is the first. */
export function grownTree(rows) {
	const root = new Node("", null);
	const nodes = [root];
	for (let row = 0; row < rows.number; row += 1) {
		const parts = rows.names[row].split(".");
		if (parts.length > DEEPEST) parts.push(parts.splice(DEEPEST - 1).join("."));
		const last = parts.pop();
		let node = root;
		for (const part of parts) node = moduleIn(node, part, nodes);
		const leaf = new Node(last, node);
		leaf.row = row;
		node.children.push(leaf);
		nodes.push(leaf);
	}
	nodes.forEach((node, at) => {
		node.at = at;
		node.children = inOrder(node.children);
	});
	total(nodes, rows);
	compare(nodes, rows);
	return nodes;
}

function moduleIn(node, name, nodes) {
	node.modules ??= new Map();
	let found = node.modules.get(name);
	if (!found) {
		found = new Node(name, node);
		node.modules.set(name, found);
		node.children.push(found);
		nodes.push(found);
	}
	return found;
}

/**
 * Return children with those that differ by numbers alone, as `10` and `layer10`, in their order, in the places that
 * they have: many writers sort names as text.
 */
function inOrder(children) {
	const alike = new Map();
	const kind = (child) => child.name.replace(NUMBERS, "#");
	for (const child of children) (alike.get(kind(child)) ?? alike.set(kind(child), []).get(kind(child))).push(child);
	const ordered = new Map([...alike].map(([name, found]) => [name, found.sort((one, other) => BY_NUMBER.compare(other.name, one.name))]));
	return children.map((child) => ordered.get(kind(child)).pop());
}

/** Count what is in each module. What is tied counts once in each. */
function total(nodes, rows) {
	const repeated = new Set(rows.tiedTo.values());
	const seen = new Map();
	for (const leaf of nodes) {
		if (!leaf.isTensor) continue;
		const kind = rows.kind(leaf.row);
		const first = rows.tiedTo.get(leaf.row) ?? (repeated.has(leaf.row) ? leaf.row : -1);
		for (let node = leaf; node; node = node.parent) {
			node.tensors += 1;
			if (first >= 0 && node !== leaf) {
				const there = seen.get(node) ?? seen.set(node, new Set()).get(node);
				if (there.has(first)) continue;
				there.add(first);
			}
			node.numel += kind.numel;
			node.nbytes += kind.nbytes;
		}
	}
}

/** Number the nodes so that those that hold the same, whatever they are called, have the same number. */
function compare(nodes, rows) {
	const known = new Map();
	for (let at = nodes.length - 1; at >= 0; at -= 1) {
		const node = nodes[at];
		const key = node.isTensor
			? `t${rows.likeness(node.row)}`
			: `m${node.children.map((child) => `${child.name}\n${child.likeness}`).sort().join("\n\n")}`;
		node.likeness = known.get(key) ?? known.set(key, known.size).get(key);
	}
}

/** Nodes that are shown as one: most are alone, and equal layers are together. */
export class Group {
	constructor(label, nodes) {
		this.label = label;
		this.nodes = nodes;
		this.first = nodes[0];
		this.number = nodes.length;
		this.nbytes = sum(nodes, "nbytes");
		this.numel = sum(nodes, "numel");
		this.tensors = sum(nodes, "tensors");
	}

	get isTensor() {
		return this.first.isTensor;
	}

	/** Return the groups inside; if `fold` is true, equal layers together. */
	inside(fold) {
		const inEach = this.nodes.map((node) => node.childrenLike(this.first));
		const groups = this.first.children.map((child, at) => new Group(child.name, inEach.map((children) => children[at])));
		return fold ? folded(groups) : groups;
	}
}

/** Return a group, or the one at the end of the chain that it begins; of the whole, a module in any case. */
export function lookedThrough(group, fold, isWhole = false) {
	let found = group;
	for (let inside = found.inside(fold); inside.length === 1; inside = found.inside(fold)) {
		if (isWhole && inside[0].isTensor) break;
		const label = found.label ? `${found.label}.${inside[0].label}` : inside[0].label;
		found = new Group(label, inside[0].nodes);
	}
	return found;
}

function folded(groups) {
	const found = [];
	for (const group of groups) {
		const run = found.at(-1);
		const first = run && !group.isTensor && run.last.likeness === group.first.likeness ? run : null;
		const follows = first && NUMBER.test(group.label) && Number(group.label) === run.next;
		if (follows) {
			run.groups.push(group);
			run.next += 1;
		} else {
			const next = NUMBER.test(group.label) ? Number(group.label) + 1 : NaN;
			found.push({ groups: [group], last: group.first, next });
		}
	}
	return found.map(({ groups }) => {
		if (groups.length === 1) return groups[0];
		return new Group(`${groups[0].label}–${groups.at(-1).label}`, groups.flatMap((group) => group.nodes));
	});
}

/** Yield the tensors of a node. */
export function* tensorsOf(node) {
	const waiting = [node];
	while (waiting.length) {
		const found = waiting.pop();
		if (found.isTensor) yield found;
		for (let at = found.children.length - 1; at >= 0; at -= 1) waiting.push(found.children[at]);
	}
}

function sum(nodes, field) {
	return nodes.reduce((whole, node) => whole + node[field], 0);
}
