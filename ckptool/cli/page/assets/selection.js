/** What is looked at: whoever changes it tells all who want to know. */

const listeners = { selected: [], pointed: [], searched: [], inked: [], files: [] };

/**
 * Call a function whenever something happens: a group is selected or pointed at, names are searched, colours change,
 * files are asked for by a word.
 */
export function on(what, listener) {
	listeners[what].push(listener);
}

export function tell(what, value, sender = null) {
	for (const listener of listeners[what]) listener(value, sender);
}
