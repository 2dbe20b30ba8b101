/** Which rows a table of tensors has, and in which order: modules that are open, or a list; all, or those searched for. */

const OPEN_AT_FIRST = 60;
const NAMES = new Intl.Collator("en", { numeric: true });

export class Entries {
	constructor(rows, nodes) {
		this.rows = rows;
		this.nodes = nodes;
		this.root = nodes[0];
		this.byModule = true;
		this.sorted = { column: null, id: "file", down: false };
		this.opened = new Set([this.root]);
		this.matches = null;
		this.joined = new Map();
		this.openSome();
		setTimeout(() => this.prepare());
	}

	/** Make the texts that are searched, before somebody does. */
	prepare() {
		this.texts ??= this.rows.searched();
	}

	/** Open what there is room for: everything in a small file, else the modules that hold nearly all. */
	openSome() {
		if (this.root.tensors <= OPEN_AT_FIRST) {
			for (const node of this.nodes) this.opened.add(node);
			return;
		}
		let node = endOfChain(this.root);
		this.opened.add(node);
		for (let level = 0; level < 4; level += 1) {
			const main = node.children.find((child) => child.tensors > 0.8 * this.root.tensors && !child.isTensor);
			if (!main) break;
			node = endOfChain(main);
			if (node.children.length > OPEN_AT_FIRST) break;
			this.opened.add(node);
		}
	}

	openAll(open) {
		this.opened = new Set(open ? this.nodes : [this.root, endOfChain(this.root)]);
	}

	/** Open everything above a node. */
	openAbove(node) {
		for (let above = node.parent; above; above = above.parent) this.opened.add(above);
	}

	isOpen(node) {
		return this.matches !== null || this.opened.has(node);
	}

	/** Keep the tensors whose names, types and devices have all the words that are asked for. */
	search(text) {
		const words = text.toLowerCase().split(/\s+/).filter(Boolean);
		this.prepare();
		this.matches = null;
		if (words.length) {
			this.matches = new Set();
			this.texts.forEach((found, row) => {
				if (words.every((word) => found.includes(word))) this.matches.add(row);
			});
		}
	}

	/** Sort by a column; numbers begin with the largest. The third time, the order is the file's again. */
	sort(id, column) {
		const falls = Boolean(column?.isNumber || column?.id === "change");
		const isSame = this.sorted.id === id;
		const isOver = isSame && this.sorted.down !== falls;
		this.sorted = isOver ? { column: null, id: "file", down: false } : { column, id, down: isSame ? !falls : falls };
		if (column && !column.join && !isOver) this.byModule = false;
	}

	/** Return what is shown: nodes with their level and their label. */
	list() {
		return this.byModule ? this.asTree(this.matches && this.keptNodes()) : this.asList();
	}

	/** Return for each node whether it matches, or something in it does. */
	keptNodes() {
		const kept = new Uint8Array(this.nodes.length);
		for (const node of this.nodes) {
			if (!node.isTensor || !this.matches.has(node.row)) continue;
			for (let one = node; one && !kept[one.at]; one = one.parent) kept[one.at] = 1;
		}
		return kept;
	}

	asTree(kept) {
		const found = [];
		const waiting = [{ node: this.root, level: -1, label: "" }];
		while (waiting.length) {
			const entry = waiting.pop();
			if (entry.level >= 0) {
				entry.node = chained(entry);
				found.push(entry);
			}
			if (entry.node.isTensor || !(kept || entry.level < 0 || this.opened.has(entry.node))) continue;
			const inside = kept ? entry.node.children.filter((child) => kept[child.at]) : entry.node.children;
			const ordered = this.ordered(inside);
			for (let at = ordered.length - 1; at >= 0; at -= 1) {
				waiting.push({ node: ordered[at], level: entry.level + 1, label: ordered[at].name });
			}
		}
		return found;
	}

	asList() {
		const leaves = this.nodes.filter((node) => node.isTensor && (!this.matches || this.matches.has(node.row)));
		return this.ordered(leaves).map((node) => ({ node, level: 0, label: this.rows.names[node.row] }));
	}

	ordered(nodes) {
		const { column, id, down } = this.sorted;
		if (id === "file") return nodes;
		const sign = down ? -1 : 1;
		if (id === "name") return [...nodes].sort((one, other) => sign * NAMES.compare(this.nameOf(one), this.nameOf(other)));
		const keys = this.keys(column);
		const keyed = nodes.map((node) => [node, keys(node)]);
		return keyed.sort(([, one], [, other]) => compared(one, other, sign)).map(([node]) => node);
	}

	nameOf(node) {
		return this.byModule ? node.name : this.rows.names[node.row];
	}

	/** Return a function that gives what a node is sorted by. Those of modules are joined of their tensors'. */
	keys(column) {
		const key = (node) => numeric(column.key(node.row));
		if (!column.join || !this.byModule) return key;
		if (!this.joined.has(column.id)) {
			const found = new Map();
			for (let at = this.nodes.length - 1; at >= 0; at -= 1) {
				const node = this.nodes[at];
				if (node.isTensor) found.set(node, key(node));
				const own = found.get(node);
				const above = found.get(node.parent);
				if (own !== null && own !== undefined && node.parent) {
					found.set(node.parent, above === undefined || above === null ? own : column.join(above, own));
				}
			}
			this.joined.set(column.id, found);
		}
		const found = this.joined.get(column.id);
		return (node) => found.get(node) ?? null;
	}

	/** Return how many tensors of a module a column counts. */
	counted(column, node) {
		if (!this.countedNodes) {
			this.countedNodes = new Map();
			for (const leaf of this.nodes) {
				if (!leaf.isTensor || !column.counts(leaf.row)) continue;
				for (let one = leaf; one; one = one.parent) this.countedNodes.set(one, (this.countedNodes.get(one) ?? 0) + 1);
			}
		}
		return this.countedNodes.get(node) ?? 0;
	}
}

/** Return the node at the end of the chain of single modules that an entry begins, and label the entry with all. */
function chained(entry) {
	let { node } = entry;
	while (node.children.length === 1 && !node.isTensor) {
		[node] = node.children;
		entry.label = entry.label ? `${entry.label}.${node.name}` : node.name;
	}
	return node;
}

function endOfChain(node) {
	return chained({ node, label: "" });
}

/** Compare two keys: what has none comes last. */
export function compared(one, other, sign) {
	if (one === null || other === null) return (one === null) - (other === null);
	if (typeof one === "string") return sign * NAMES.compare(one, other);
	return sign * (one - other) || 0;
}

/** Return a key that can be compared: infinities are text in the data. */
function numeric(key) {
	if (key === "inf" || key === "-inf") return key === "inf" ? Infinity : -Infinity;
	return key === "nan" ? null : key;
}
