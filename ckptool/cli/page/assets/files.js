/** The files of a folder: a row for each, to search and to sort. */

import { byId, element } from "./dom.js";
import { compared } from "./entries.js";
import { on } from "./selection.js";
import { bytes, count, counted } from "./text.js";

const MOST_FILES = 2000;
const STATES = { error: "✕ error", warning: "⚠ warning" };
const GRADES = ["data", "program", "code", "system", "unknown"];
const COLUMNS = [
	{ title: "state", key: (file) => ["warning", "error"].indexOf(file.worst), falls: true, cell: state },
	{ title: "file", key: (file) => file.name, cell: (file) => element("code", {}, file.name) },
	{ title: "worst finding", key: (file) => file.finding || null, cell: (file) => file.finding },
	{ title: "grade", key: (file) => GRADES.indexOf(file.grade), falls: true, cell: (file) => file.grade },
	{ title: "form", key: (file) => form(file), cell: form },
	{ title: "tensors", key: (file) => file.tensors, falls: true, isNumber: true, cell: (file) => (file.tensors === null ? "–" : count(file.tensors)) },
	{ title: "size", key: (file) => file.file_nbytes, falls: true, isNumber: true, cell: (file) => (file.file_nbytes === null ? "–" : bytes(file.file_nbytes)) },
];

export class FileTable {
	constructor(files) {
		this.files = files;
		this.sorted = { column: COLUMNS[0], down: true };
		this.table = byId("file-table");
		byId("search-files").addEventListener("input", () => this.draw());
		on("files", (text) => {
			byId("search-files").value = text;
			this.draw();
			byId("files").scrollIntoView();
		});
		this.table.addEventListener("click", (event) => {
			const name = event.target.closest("tr[data-name]")?.dataset.name;
			if (name === undefined) return;
			const search = byId("search");
			search.value = name;
			search.dispatchEvent(new Event("input"));
			byId("tensors").scrollIntoView();
		});
		this.draw();
	}

	sort(column) {
		const isSame = this.sorted.column === column;
		this.sorted = { column, down: isSame ? !this.sorted.down : Boolean(column.falls) };
		this.draw();
	}

	draw() {
		const { column, down } = this.sorted;
		const words = byId("search-files").value.toLowerCase().split(/\s+/).filter(Boolean);
		const found = this.files.filter((file) => words.every((word) => searchedText(file).includes(word)));
		found.sort((one, other) => compared(column.key(one), column.key(other), down ? -1 : 1) || compared(one.name, other.name, 1));
		const heads = COLUMNS.map((one) => {
			const arrow = one === column ? (down ? " ↓" : " ↑") : "";
			const order = one === column ? (down ? "descending" : "ascending") : "none";
			const button = element("button", { type: "button", onclick: () => this.sort(one) }, one.title + arrow);
			return element("th", { scope: "col", "aria-sort": order, class: one.isNumber ? "number" : "" }, button);
		});
		const rows = found.slice(0, MOST_FILES).map((file) => {
			const cells = COLUMNS.map((one) => element("td", { class: one.isNumber ? "number" : one.title.replace(" ", "-") }, one.cell(file)));
			const row = element("tr", {}, ...cells);
			row.dataset.name = file.name;
			return row;
		});
		this.table.replaceChildren(element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
		const some = found.length < this.files.length ? `${count(found.length)} of ` : "";
		const left = found.length > MOST_FILES ? ` The first ${count(MOST_FILES)} are shown: search for others.` : "";
		byId("file-count").textContent = `${some}${counted(this.files.length, "file")}.${left}`;
	}
}

function state(file) {
	return element("span", { class: `state ${file.worst in STATES ? file.worst : "fine"}` }, STATES[file.worst] ?? "✓ fine");
}

function form(file) {
	return file.form ? `${file.format}, ${file.form}` : "–";
}

function searchedText(file) {
	return `${file.name} ${file.finding} ${file.codes.join(" ")} ${file.grade} ${form(file)} ${file.worst ?? "fine"}`.toLowerCase();
}
