/** Elements of the page. Text is always text: nothing here takes markup. */

/** Return an element: `properties` are set as they are, but for `class` and attributes with a dash in their name. */
export function element(tag, properties = {}, ...children) {
	const made = document.createElement(tag);
	for (const [name, value] of Object.entries(properties)) {
		if (name === "class") made.className = value;
		else if (name.includes("-") || name === "role") made.setAttribute(name, value);
		else made[name] = value;
	}
	made.append(...children.filter((child) => child !== null && child !== undefined));
	return made;
}

/** Return the element of the page with this id. */
export function byId(id) {
	return document.getElementById(id);
}

/** Return a list of labels with values; a value may be several lines. */
export function definitions(pairs, name = "") {
	const list = element("dl", { class: name });
	for (const [label, value] of pairs) {
		const lines = Array.isArray(value) ? value : [value];
		list.append(element("dt", {}, label), element("dd", {}, ...lines.map((line) => element("div", {}, line))));
	}
	return list;
}

/** Run a function before the next frame is drawn, however often that is asked for until then. */
export function oncePerFrame(run) {
	let waits = false;
	return () => {
		if (waits) return;
		waits = true;
		requestAnimationFrame(() => {
			waits = false;
			run();
		});
	};
}
