/** The table of tensors, by module or as a list. Only the rows that can be seen are on the page. */

import { byId, element, oncePerFrame } from "./dom.js";
import { Entries } from "./entries.js";
import { on, tell } from "./selection.js";
import { bytes, counted, cutMiddle } from "./text.js";
import { Group } from "./tree.js";

const ROW = 28;
const MORE = 6;
const MOST = 300_000;
const ON_PAPER = 2000;
const ROOT_SIZE = parseFloat(getComputedStyle(document.documentElement).fontSize);
const ROOM_FOR_ALL = 44;
const NARROWEST_NAME = 14;

export class Table {
	constructor(rows, nodes, columns) {
		this.rows = rows;
		this.all = columns;
		this.columns = columns;
		this.list = new Entries(rows, nodes);
		this.entries = [];
		this.current = -1;
		this.table = byId("table");
		this.scroller = byId("scroller");
		this.head = element("thead");
		this.body = element("tbody");
		this.table.append(element("colgroup"), this.head, this.body);
		this.redraw = oncePerFrame(() => this.draw());
		this.listen();
		this.height = 0;
		this.room = 0;
		this.arrange();
		this.fit();
	}

	listen() {
		this.scroller.addEventListener("scroll", this.redraw, { passive: true });
		new ResizeObserver(() => this.fit()).observe(this.scroller);
		this.table.addEventListener("keydown", (event) => this.key(event));
		this.body.addEventListener("click", (event) => {
			const row = event.target.closest("tr[data-at]");
			if (row) this.choose(Number(row.dataset.at), true);
		});
		byId("search").addEventListener("input", (event) => this.search(event.target.value));
		byId("by-module").addEventListener("change", (event) => this.group(event.target.checked));
		byId("unfold").addEventListener("click", () => this.openAll(true));
		byId("refold").addEventListener("click", () => this.openAll(false));
		document.addEventListener("keydown", (event) => {
			if (event.key === "/" && !event.target.closest("input, select")) {
				byId("search").focus();
				event.preventDefault();
			}
		});
		addEventListener("beforeprint", () => this.draw(ON_PAPER));
		addEventListener("afterprint", () => this.draw());
		on("selected", (group, sender) => sender !== this && this.reveal(group.first));
		on("inked", this.redraw);
	}

	/** Do without some columns where there is little room. */
	fit() {
		const room = this.scroller.clientWidth / ROOT_SIZE;
		this.columns = this.all.filter((column) => room >= ROOM_FOR_ALL || !column.spare);
		this.showHead();
		this.room = this.roomForNames();
		this.height = this.scroller.clientHeight;
		this.draw();
	}

	showWidths() {
		const cols = this.columns.map((column) => {
			const found = element("col");
			found.style.width = `${column.width}rem`;
			return found;
		});
		const others = this.columns.reduce((sum, column) => sum + column.width, 0);
		this.table.style.minWidth = `${NARROWEST_NAME + others}rem`;
		this.table.querySelector("colgroup").replaceChildren(element("col"), ...cols);
	}

	search(text) {
		this.list.search(text);
		this.begin();
		tell("searched", this.list.matches, this);
	}

	group(byModule) {
		this.list.byModule = byModule;
		this.begin();
	}

	openAll(open) {
		this.list.openAll(open);
		this.begin();
	}

	sort(id) {
		this.list.sort(id, this.columns.find((one) => one.id === id));
		this.showHead();
		this.begin();
	}

	/** Show other rows, from the first one on. */
	begin() {
		this.scroller.scrollTop = 0;
		this.current = -1;
		this.arrange();
	}

	arrange() {
		const { byModule } = this.list;
		byId("by-module").checked = byModule;
		byId("unfold").hidden = byId("refold").hidden = !byModule;
		this.entries = this.list.list();
		this.current = Math.min(this.current, this.entries.length - 1);
		this.showCount();
		this.draw();
	}

	showCount() {
		const { number } = this.rows;
		const cut = this.entries.length > MOST ? ` The first ${MOST.toLocaleString("en-US")} rows are shown: search for others.` : "";
		const { matches } = this.list;
		if (!matches) {
			byId("count").textContent = `${counted(number, "tensor")}.${cut}`;
			return;
		}
		let nbytes = 0;
		for (const row of matches) nbytes += this.rows.kind(row).nbytes;
		byId("count").textContent = `${matches.size.toLocaleString("en-US")} of ${counted(number, "tensor")}, ${bytes(nbytes)}.${cut}`;
	}

	showHead() {
		const heads = [{ id: "name", title: "name" }, ...this.columns].map((column) => {
			const isSorted = this.list.sorted.id === column.id;
			const arrow = isSorted ? (this.list.sorted.down ? " ↓" : " ↑") : "";
			const label = column.id === "histogram" ? element("button", { type: "button", disabled: true }, column.title)
				: element("button", { type: "button", onclick: () => this.sort(column.id) }, column.title + arrow);
			const state = isSorted ? (this.list.sorted.down ? "descending" : "ascending") : "none";
			return element("th", { class: classes(column), scope: "col", "aria-sort": state }, label);
		});
		this.head.replaceChildren(element("tr", {}, ...heads));
		this.showWidths();
	}

	/** Put the rows on the page that can be seen, and some more; on paper, the first ones. */
	draw(paper = 0) {
		const number = Math.min(this.entries.length, MOST);
		const top = this.scroller.scrollTop;
		const first = paper ? 0 : Math.max(0, Math.floor(top / ROW) - MORE);
		const last = paper ? Math.min(number, paper) : Math.min(number, Math.ceil((top + this.height) / ROW) + MORE);
		const shown = this.entries.slice(first, last).map((entry, at) => this.row(entry, first + at));
		const below = paper ? 0 : number - last;
		if (paper && last < number) shown.push(this.leftOut(number - last));
		this.body.replaceChildren(this.filler(first), ...shown, this.filler(below));
		this.table.setAttribute("aria-rowcount", String(number + 1));
		this.table.setAttribute("aria-activedescendant", this.current < 0 ? "" : `row-${this.current}`);
	}

	filler(rows) {
		const cell = element("td", { colSpan: this.columns.length + 1 });
		cell.style.height = `${rows * ROW}px`;
		const row = element("tr", { class: "fill", "aria-hidden": "true" }, cell);
		row.hidden = rows === 0;
		return row;
	}

	leftOut(number) {
		return element("tr", {}, element("td", { colSpan: this.columns.length + 1 }, `and ${number.toLocaleString("en-US")} more`));
	}

	/** Return how many characters of a name there is room for. */
	roomForNames() {
		if (!this.charWidth) {
			const probe = element("td", { class: "name" }, "0".repeat(100));
			const ruler = element("span", { class: "mono" }, "0".repeat(100));
			probe.replaceChildren(ruler);
			this.body.replaceChildren(element("tr", {}, probe));
			ruler.style.fontSize = getComputedStyle(probe).fontSize;
			this.charWidth = ruler.getBoundingClientRect().width / 100;
		}
		const cell = this.head.querySelector("th");
		return Math.max(8, Math.floor((cell.clientWidth - 20) / this.charWidth));
	}

	row(entry, at) {
		const { node, level } = entry;
		const cells = this.columns.map((column) => {
			const content = node.isTensor ? column.cell(node.row) : this.total(column, node);
			return element("td", { class: classes(column), role: "gridcell" }, content);
		});
		const isCurrent = at === this.current;
		const properties = {
			id: `row-${at}`, class: [node.isTensor ? "" : "module", isCurrent ? "current" : ""].join(" "), role: "row",
			"aria-rowindex": String(at + 2), "aria-level": String(level + 1), "aria-selected": String(isCurrent),
		};
		if (!node.isTensor) properties["aria-expanded"] = String(this.list.isOpen(node));
		const made = element("tr", properties, this.nameCell(entry), ...cells);
		made.dataset.at = String(at);
		return made;
	}

	nameCell({ node, level, label }) {
		const indent = this.list.byModule ? 1.1 * Math.min(level, 16) : 0;
		const twist = this.list.byModule ? element("span", { class: "twist", "aria-hidden": "true" }, node.isTensor ? "" : this.list.isOpen(node) ? "▾" : "▸") : null;
		const more = node.isTensor ? "" : `  ${counted(node.tensors, "tensor")}`;
		const room = this.room - Math.ceil((indent + 1.2) * 2) - more.length;
		const text = cutMiddle(label || "(empty)", Math.max(8, room));
		const cell = element("td", { class: "name", role: "gridcell" }, twist, text, more ? element("span", { class: "quiet" }, more) : null);
		if (text !== label) cell.title = label;
		cell.style.paddingLeft = `${0.6 + indent}rem`;
		return cell;
	}

	total(column, node) {
		if (column.counts) return column.total(node, this.list.counted(column, node));
		if (column.total) return column.total(node);
		if (!column.join || column.isNumber !== true) return "";
		const joined = this.list.keys(column)(node);
		return joined === null ? "" : column.text(joined);
	}

	/** Make a row the current one; a module that is clicked opens or closes. */
	choose(at, toggles) {
		const entry = this.entries[at];
		if (!entry) return;
		this.current = at;
		if (toggles && !entry.node.isTensor) this.toggle(entry.node);
		else this.draw();
		tell("selected", new Group(entry.label, [entry.node]), this);
	}

	toggle(node) {
		const { opened } = this.list;
		if (!opened.delete(node)) opened.add(node);
		this.arrange();
	}

	key(event) {
		if (event.target !== this.table) return;
		const entry = this.entries[this.current];
		const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW) - 2);
		const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
		if (event.key in moves) this.moveTo(this.current + moves[event.key]);
		else if (!entry) return;
		else if (event.key === "Enter" || event.key === " ") this.choose(this.current, true);
		else if (event.key === "ArrowRight" && !entry.node.isTensor && !this.list.isOpen(entry.node)) this.toggle(entry.node);
		else if (event.key === "ArrowRight") this.moveTo(this.current + 1);
		else if (event.key === "ArrowLeft") this.closeOrLeave(entry);
		else return;
		event.preventDefault();
	}

	closeOrLeave(entry) {
		if (!entry.node.isTensor && this.list.opened.has(entry.node) && !this.list.matches) {
			this.toggle(entry.node);
			return;
		}
		const above = this.entries.findLastIndex((one, at) => at < this.current && one.level < entry.level);
		if (above >= 0) this.moveTo(above);
	}

	moveTo(at) {
		if (!this.entries.length) return;
		const target = Math.max(0, Math.min(Math.min(this.entries.length, MOST) - 1, at));
		this.scrollTo(target);
		this.choose(target, false);
	}

	scrollTo(at) {
		const top = at * ROW;
		const room = this.scroller.clientHeight - this.head.offsetHeight - ROW;
		if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
		else if (top > this.scroller.scrollTop + room) this.scroller.scrollTop = top - room;
	}

	/** Show the row of a node that was selected elsewhere. */
	reveal(node) {
		const { matches } = this.list;
		if (matches !== null && !(node.isTensor && matches.has(node.row))) return;
		this.list.openAbove(node);
		if (this.list.byModule) this.arrange();
		const at = this.entries.findIndex((entry) => entry.node === node);
		if (at < 0) return;
		this.current = at;
		this.scroller.scrollTop = Math.max(0, at * ROW - this.scroller.clientHeight / 3);
		this.draw();
	}
}

function classes(column) {
	return [column.isNumber ? "number" : "", column.id === "shape" ? "shape" : ""].filter(Boolean).join(" ");
}
