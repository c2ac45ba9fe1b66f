const all=(root,what)=>[...root.querySelectorAll(what)];
all(document,'figure').forEach(figure=>{
 const svg=figure.querySelector('.plot svg'),rows=all(figure,'tr[data-x]'),out=figure.querySelector('output');
 if(!svg||!rows.length)return;
 const heads=all(figure,'th'),cursor=svg.querySelector('.cursor');
 const say=row=>{out.textContent=[...row.children].map((cell,at)=>heads[at].className?'':heads[at].textContent+' '+cell.textContent)
  .filter(text=>text).join(' \u00b7 ')};
 svg.onpointermove=event=>{
  const box=svg.getBoundingClientRect(),x=(event.clientX-box.left)/box.width;
  const near=rows.reduce((best,row)=>Math.abs(row.dataset.x-x)<Math.abs(best.dataset.x-x)?row:best);
  cursor.setAttribute('x1',near.dataset.x*1000);cursor.setAttribute('x2',near.dataset.x*1000);cursor.style.visibility='visible';say(near)};
 svg.onpointerleave=()=>{cursor.style.visibility='hidden';say(rows[rows.length-1])};
 say(rows[rows.length-1]);
});
all(document,'th button').forEach(button=>button.onclick=()=>{
 const head=button.parentNode,at=[...head.parentNode.children].indexOf(head),body=head.closest('table').tBodies[0];
 const down=head.getAttribute('aria-sort')!=='descending';
 all(head.parentNode,'th').forEach(other=>other.removeAttribute('aria-sort'));
 head.setAttribute('aria-sort',down?'descending':'ascending');
 const key=row=>row.children[at].dataset.v,text=row=>row.children[at].textContent;
 const order=(a,b)=>key(a)!==undefined&&key(b)!==undefined?key(a)-key(b):
  key(a)!==undefined?1:key(b)!==undefined?-1:text(a).localeCompare(text(b),undefined,{numeric:true});
 body.append(...[...body.rows].sort((a,b)=>down?order(b,a):order(a,b)));
});
addEventListener('beforeprint',()=>all(document,'details:not([open])').forEach(each=>{each.open=true;each.dataset.shut=1}));
addEventListener('afterprint',()=>all(document,'details[data-shut]').forEach(each=>{each.open=false;delete each.dataset.shut}));
