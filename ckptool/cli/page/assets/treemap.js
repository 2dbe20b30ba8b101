/** The treemap: boxes inside boxes, each as large as what it holds. */

import { byId, element, oncePerFrame } from "./dom.js";
import { isDark } from "./colours.js";
import { on, tell } from "./selection.js";
import { squares } from "./squares.js";
import { bytes, count, percent } from "./text.js";
import { Group, lookedThrough, tensorsOf } from "./tree.js";

const HEADER = 19;
const ROOM_FOR_HEADER = { width: 54, height: 40 };
const SMALLEST_AREA = 70;
const SMALLEST_SIDE = 10;
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

/** A part of the drawing: of a group, or of the groups of `parent` that are too small to be drawn one by one. */
class Box {
	constructor(group, place, parent, many = 0) {
		Object.assign(this, place);
		this.group = group;
		this.parent = parent;
		this.many = many;
		this.isSplit = false;
		this.hasHeader = false;
	}

	has(x, y) {
		return x >= this.x && y >= this.y && x < this.x + this.width && y < this.y + this.height;
	}
}

export class Treemap {
	constructor(root) {
		this.home = byId("treemap");
		[this.canvas, this.overlay] = this.home.querySelectorAll("canvas");
		this.root = root;
		this.scheme = null;
		this.setFold(false);
		this.boxes = [];
		this.pointed = null;
		this.matches = null;
		this.redraw = oncePerFrame(() => this.draw());
		this.repaint = oncePerFrame(() => this.paintAll());
		this.listen();
	}

	/** Take equal layers together, or not; everything is shown then. */
	setFold(fold) {
		this.fold = fold;
		this.stack = [lookedThrough(new Group("", [this.root]), fold, true)];
	}

	get focus() {
		return this.stack.at(-1);
	}

	/** Show another module, or go back to one that is above. */
	enter(stack) {
		this.stack = stack;
		this.pointed = null;
		this.draw();
		this.showCrumbs();
		tell("selected", this.focus, this);
	}

	listen() {
		new ResizeObserver(this.redraw).observe(this.home);
		this.home.addEventListener("pointermove", (event) => this.point(this.at(event)));
		this.home.addEventListener("pointerleave", () => this.point(null));
		this.home.addEventListener("click", (event) => this.open(this.at(event)));
		this.home.addEventListener("keydown", (event) => this.key(event));
		this.home.addEventListener("focusout", () => this.point(null));
		on("inked", this.redraw);
		on("searched", (matches) => {
			this.matches = matches;
			this.repaint();
		});
	}

	at(event) {
		const { left, top } = this.home.getBoundingClientRect();
		const [x, y] = [event.clientX - left, event.clientY - top];
		return this.boxes.findLast((box) => box.has(x, y)) ?? null;
	}

	point(box) {
		if (box === this.pointed) return;
		this.pointed = box;
		this.drawOverlay();
		tell("pointed", box && { group: box.group, many: box.many }, this);
	}

	/** Go into the innermost module of a box; a tensor is selected. */
	open(box) {
		if (!box) return;
		const above = [];
		for (let one = box; one; one = one.parent) above.unshift(one);
		const modules = above.filter((one) => !one.group.isTensor && !one.many).map((one) => one.group);
		if (modules.length) this.enter([...this.stack, ...modules]);
		if (box.group.isTensor) tell("selected", box.group, this);
	}

	out() {
		if (this.stack.length > 1) this.enter(this.stack.slice(0, -1));
	}

	key(event) {
		const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
		if (event.key in moves) this.move(...moves[event.key]);
		else if (event.key === "Enter" || event.key === " ") this.open(this.pointed);
		else if (event.key === "Escape" || event.key === "Backspace") this.out();
		else return;
		event.preventDefault();
	}

	/** Point at the nearest box in a direction, of those that lie directly in what is shown. */
	move(x, y) {
		const outer = this.boxes.filter((box) => box.parent === null);
		const from = this.pointed && outer.find((box) => box.has(this.pointed.x + 1, this.pointed.y + 1));
		if (!from) {
			this.point(outer[0] ?? null);
			return;
		}
		const middle = (box) => [box.x + box.width / 2, box.y + box.height / 2];
		const [fromX, fromY] = middle(from);
		const ranked = outer
			.filter((box) => box !== from)
			.map((box) => [box, middle(box)])
			.map(([box, [toX, toY]]) => [box, (toX - fromX) * x + (toY - fromY) * y, Math.abs((toX - fromX) * y + (toY - fromY) * x)])
			.filter(([, along]) => along > 1)
			.sort((one, other) => one[1] + 2 * one[2] - other[1] - 2 * other[2]);
		if (ranked.length) this.point(ranked[0][0]);
	}

	/** Arrange the boxes and draw them. */
	draw() {
		const { clientWidth: width, clientHeight: height } = this.home;
		if (!width || !height) return;
		for (const canvas of [this.canvas, this.overlay]) {
			canvas.width = Math.round(width * devicePixelRatio);
			canvas.height = Math.round(height * devicePixelRatio);
		}
		this.boxes = [];
		this.arrange(this.focus, { x: 0, y: 0, width, height }, null);
		const pen = this.pen(this.canvas);
		const style = getComputedStyle(document.body);
		this.look = { theme: isDark() ? "dark" : "light", ink: style.color, frame: style.getPropertyValue("--faint") };
		this.look.hatching = hatching(pen, style.backgroundColor);
		for (const box of this.boxes) this.dress(pen, box);
		this.paintAll();
		this.drawOverlay();
		const label = this.focus.label || "everything";
		this.home.setAttribute("aria-label", `Treemap of ${label}: ${count(this.focus.tensors)} tensors, ${this.size(this.focus)}`);
	}

	pen(canvas) {
		const pen = canvas.getContext("2d");
		pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
		pen.font = FONT;
		pen.textBaseline = "middle";
		return pen;
	}

	/** The size of a box: its bytes; its elements where nothing in the file has bytes. */
	weight(group) {
		return this.stack[0].nbytes ? group.nbytes : group.numel;
	}

	size(group) {
		return this.stack[0].nbytes ? bytes(group.nbytes) : `${count(group.numel)} elements`;
	}

	arrange(group, place, parent) {
		const groups = group.inside(this.fold).map((one) => lookedThrough(one, this.fold));
		const inside = groups.filter((one) => this.weight(one) > 0);
		inside.sort((one, other) => this.weight(other) - this.weight(one));
		const sizes = inside.map((one) => this.weight(one));
		const whole = sizes.reduce((sum, size) => sum + size, 0);
		const smallest = (SMALLEST_AREA * whole) / (place.width * place.height);
		let drawn = sizes.findIndex((size) => size < smallest);
		if (drawn < 0 || drawn === sizes.length - 1) drawn = sizes.length;
		const rest = sizes.slice(drawn).reduce((sum, size) => sum + size, 0);
		const shown = rest ? [...sizes.slice(0, drawn), rest].sort((one, other) => other - one) : sizes;
		const at = rest ? shown.indexOf(rest) : -1;
		squares(shown, place.x, place.y, place.width, place.height).forEach((found, index) => {
			const box = new Box(index === at ? group : inside[at >= 0 && index > at ? index - 1 : index], found, parent,
				index === at ? inside.length - drawn : 0);
			this.boxes.push(box);
			if (!box.many && !box.group.isTensor) this.split(box);
		});
	}

	split(box) {
		if (box.width < 2 * SMALLEST_SIDE || box.height < SMALLEST_SIDE) return;
		box.isSplit = true;
		box.hasHeader = box.width >= ROOM_FOR_HEADER.width && box.height >= ROOM_FOR_HEADER.height;
		const edge = box.width > 40 && box.height > 30 ? 2 : 1;
		const top = box.hasHeader ? HEADER : edge;
		const [width, height] = [box.width - 2 * edge, box.height - top - edge];
		if (width > 2 && height > 2) this.arrange(box.group, { x: box.x + edge, y: box.y + top, width, height }, box);
	}

	/** Decide how a box looks: its colour, and what is written in it. */
	dress(pen, box) {
		const { theme, ink, frame } = this.look;
		if (box.isSplit) Object.assign(box, { fill: frame, ink });
		else Object.assign(box, box.group.isTensor ? this.scheme.colour(box.group.first, theme) : this.dominant(box.group, theme));
		box.words = [];
		if (box.hasHeader) this.write(pen, box, HEADER);
		else if (!box.isSplit && box.width > 34 && box.height > 15) this.write(pen, box, Math.min(box.height, 22));
	}

	/** Write a name in a box, and its size where there is room: beside the name, or below. */
	write(pen, box, height) {
		const room = box.width - 10;
		const size = this.size(box.group);
		const name = fitting(pen, box.many ? [`${count(box.many)} more`] : [nameOf(box.group), lastOf(box.group)], room);
		if (!name) return;
		const [left, middle] = [box.x + 5, box.y + height / 2 + 0.5];
		box.words.push([name, left, middle]);
		if (box.many) return;
		const width = pen.measureText(size).width;
		if (room - pen.measureText(name).width - 10 > width) box.words.push([size, left + room - width - 1, middle]);
		else if (!box.isSplit && box.height > 36 && width < room) box.words.push([size, left, box.y + 28]);
	}

	paintAll() {
		const pen = this.pen(this.canvas);
		pen.clearRect(0, 0, this.home.clientWidth, this.home.clientHeight);
		for (const box of this.boxes) this.paint(pen, box);
	}

	paint(pen, box) {
		const [width, height] = [Math.max(0.5, box.width - 1), Math.max(0.5, box.height - 1)];
		const isDimmed = !box.isSplit && this.isDimmed(box.group);
		pen.globalAlpha = isDimmed ? 0.22 : 1;
		pen.fillStyle = box.fill;
		pen.fillRect(box.x, box.y, width, height);
		if (box.many) {
			pen.fillStyle = this.look.hatching;
			pen.fillRect(box.x, box.y, width, height);
		}
		if (!box.words.length) return;
		pen.fillStyle = isDimmed ? this.look.ink : box.ink;
		for (const [text, x, y] of box.words) pen.fillText(text, x, y);
	}

	/** Return the colour of most of what is in a module that is drawn as one box; that of NaN, if there are any in it. */
	dominant(group, theme) {
		let largest = null;
		for (const leaf of tensorsOf(group.first)) {
			if (this.scheme.isMarked?.(leaf)) return this.scheme.colour(leaf, theme);
			if (!largest || leaf.nbytes > largest.nbytes) largest = leaf;
		}
		return this.scheme.colour(largest ?? group.first, theme);
	}

	isDimmed(group) {
		return this.matches !== null && group.isTensor && !group.nodes.some((node) => this.matches.has(node.row));
	}

	drawOverlay() {
		const pen = this.pen(this.overlay);
		pen.clearRect(0, 0, this.home.clientWidth, this.home.clientHeight);
		const style = getComputedStyle(document.body);
		pen.strokeStyle = style.color;
		for (let box = this.pointed; box; box = box.parent) {
			pen.lineWidth = box === this.pointed ? 2 : 1;
			pen.strokeRect(box.x + 0.5, box.y + 0.5, Math.max(1, box.width - 2), Math.max(1, box.height - 2));
		}
	}

	showCrumbs() {
		const steps = this.stack.map((group, at) => {
			const label = at ? nameOf(group) : group.label || "everything";
			if (at === this.stack.length - 1) return element("span", { "aria-current": "true" }, label);
			const back = () => this.enter(this.stack.slice(0, at + 1));
			return element("button", { type: "button", onclick: back }, label);
		});
		byId("crumbs").replaceChildren(...steps.flatMap((step, at) => (at ? [element("span", {}, "›"), step] : [step])));
	}

	/** Return what a group comes to beside everything that is shown. */
	share(group) {
		return percent(this.weight(group), this.weight(this.stack[0]));
	}
}

/** Return the name of a group inside its module, and how many it stands for. */
export function nameOf(group) {
	return group.number > 1 ? `${group.label || "(empty)"} × ${count(group.number)}` : group.label || "(empty)";
}

/** Return the end of a name that is a chain of modules. */
function lastOf(group) {
	return group.label.slice(group.label.lastIndexOf(".") + 1);
}

/** Return the first of these texts for which there is room. */
function fitting(pen, texts, room) {
	return texts.find((text) => pen.measureText(text).width <= room);
}

function hatching(pen, colour) {
	const tile = new OffscreenCanvas(6, 6);
	const tilePen = tile.getContext("2d");
	tilePen.strokeStyle = colour;
	tilePen.globalAlpha = 0.6;
	tilePen.beginPath();
	for (const from of [-6, 0, 6]) {
		tilePen.moveTo(from, 6);
		tilePen.lineTo(from + 6, 0);
	}
	tilePen.stroke();
	return pen.createPattern(tile, "repeat");
}
